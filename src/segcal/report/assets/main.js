// Puts the page together.
const SECTIONS = [
  [headlineSection, "Summary"],
  [methodsSection, "Methods"],
  [channelsSection, "Channels"],
  [pooledSection, "Pooled"],
  [reliabilitySection, "Reliability"],
  [classesSection, channels.length ? "Inside" : "Classes"],
  [bandsSection, "Boundary"],
  [tradeoffSection, "Trade-off"],
  [pairedSection, "Cases"],
  [browserSection, "Pictures"],
  [diagnosisSection, "Diagnosis"],
  [statisticsSection, "Statistics"],
  [shiftSection, "Shift"],
  [sensitivitySection, "Sensitivity"],
  [definitionsSection, "Definitions"],
];

function buildPage() {
  const content = document.getElementById("content");
  const contents = document.getElementById("contents");
  for (const [make, name] of SECTIONS) {
    const made = make();
    if (!made) continue;
    content.append(made);
    contents.append(html("a", { href: `#${made.id}` }, name));
  }
  content.append(
    html(
      "footer",
      {},
      `Made by segcal ${study.about.versions?.segcal ?? ""}. This page is self-contained and loads nothing.`,
    ),
  );
  followScrolling(contents);
  themeButton();
  addEventListener("scroll", hideTooltip, { passive: true });
}

// Marks the section in view in the list of contents.
function followScrolling(contents) {
  const links = new Map([...contents.children].map((link) => [link.getAttribute("href").slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        links.forEach((link) => link.removeAttribute("aria-current"));
        const link = links.get(entry.target.id);
        link.setAttribute("aria-current", "true");
        contents.scrollTo({ left: link.offsetLeft - contents.clientWidth / 2 + link.clientWidth / 2 });
      }
    },
    { rootMargin: "-30% 0px -65% 0px" },
  );
  links.forEach((_, id) => seen.observe(document.getElementById(id)));
}

// Light or dark as the system says, until the reader chooses; the choice is remembered where the browser allows it.
function themeButton() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Switch to light colours" : "Switch to dark colours");
    button.setAttribute("aria-pressed", String(dark()));
  };
  const remembered = memory(() => localStorage.getItem("segcal-theme"));
  if (remembered === "dark" || remembered === "light") root.dataset.theme = remembered;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    memory(() => localStorage.setItem("segcal-theme", root.dataset.theme));
    label();
  });
  system.addEventListener("change", label);
  label();
}

function memory(action) {
  try {
    return action();
  } catch {
    return null;
  }
}

buildPage();
