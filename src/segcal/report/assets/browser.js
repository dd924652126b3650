// Pictures of a few cases, slice by slice.
let openCase = () => {};

// Colours as segcal.compare draws them, so that the keys beneath the pictures tell the truth.
const CONFIDENCE_COLOURS = ["rgb(13 8 60)", "rgb(46 66 138)", "rgb(32 131 141)", "rgb(94 201 120)", "rgb(253 240 150)"];
const TEMPERATURE_COLOURS = [
  "rgb(33 82 163)",
  "rgb(146 181 222)",
  "rgb(247 247 247)",
  "rgb(231 148 122)",
  "rgb(160 22 38)",
];
const IGNORED_COLOUR = ["rgb(128 128 128)", "ignored"];
const WRONG_COLOUR = "rgb(200 50 40)";
const CLASS_COLOURS = [
  "rgb(40 40 46)",
  "rgb(230 159 0)",
  "rgb(86 180 233)",
  "rgb(0 158 115)",
  "rgb(240 228 66)",
  "rgb(0 114 178)",
  "rgb(213 94 0)",
];

// More classes take hues a golden angle apart.
function classColour(index) {
  if (index < CLASS_COLOURS.length) return CLASS_COLOURS[index];
  const turn = 0.382 * (index - CLASS_COLOURS.length);
  const channel = (third) => Math.trunc(60 + 180 * (0.5 + 0.5 * Math.cos(2 * Math.PI * (turn + third / 3))));
  return `rgb(${channel(0)} ${channel(1)} ${channel(2)})`;
}

const confidenceKey = () => ramp(CONFIDENCE_COLOURS, ["0%", "50%", "100%"]);
const PANELS = {
  image: ["Image"],
  label: ["True label"],
  prediction: ["Prediction"],
  "confidence before": ["Confidence before", confidenceKey],
  "confidence after": ["Confidence after", confidenceKey],
  temperature: ["Temperature", () => ramp(TEMPERATURE_COLOURS, ["more confident", "less confident"])],
  error: ["Errors", () => swatches([[WRONG_COLOUR, "wrong"], IGNORED_COLOUR])],
  flips: [
    "Changed labels",
    () =>
      swatches([
        [WRONG_COLOUR, "worse"],
        ["rgb(0 140 100)", "better"],
        ["rgb(230 159 0)", "wrong to wrong"],
      ]),
  ],
};

function ramp(colours, words) {
  const bar = html("span", { class: "ramp" });
  bar.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
  return html(
    "span",
    { class: "fine" },
    bar,
    html(
      "span",
      { class: "ramp-words" },
      words.map((word) => html("span", {}, word)),
    ),
  );
}

function swatches(entries) {
  return html(
    "span",
    { class: "fine swatches" },
    entries.map(([colour, word]) => {
      const swatch = html("span", { class: "swatch" });
      swatch.style.background = colour;
      return html("span", {}, swatch, word);
    }),
  );
}

function browserSection() {
  const cases = study.browser.filter((each) => each.slices.length);
  if (!cases.length) return null;
  const state = { case: 0, slice: Math.floor((cases[0].slices.length - 1) / 2) };
  const pictures = html("div", { class: "pictures" });
  const numbers = html("dl", { class: "numbers" });
  const position = html("output", { class: "fine" });
  const list = chooser(
    "Case",
    cases.map((each, index) => [String(index), titleOf(each)]),
    "0",
    (value) => show(Number(value)),
  );
  const slider = html("input", {
    type: "range",
    min: 0,
    step: 1,
    id: "slice",
    "aria-label": "Slice",
    on: { input: () => show(state.case, Number(slider.value)) },
  });
  const sliderRow = html("div", { class: "slider" }, html("label", { for: "slice" }, "Slice"), slider, position);
  const step = (by) => show((state.case + by + cases.length) % cases.length);
  const stepSlice = (by) =>
    show(state.case, Math.max(0, Math.min(cases[state.case].slices.length - 1, state.slice + by)));

  function show(index, slice) {
    const each = cases[index];
    state.case = index;
    state.slice = slice ?? Math.floor((each.slices.length - 1) / 2);
    const shown = each.slices[state.slice];
    list.querySelector("select").value = String(index);
    slider.max = each.slices.length - 1;
    slider.value = state.slice;
    sliderRow.hidden = each.slices.length < 2;
    position.textContent =
      shown.index === null ? "" : `${shown.index} (${state.slice + 1} of ${each.slices.length} shown)`;
    slider.setAttribute("aria-valuetext", position.textContent);
    pictures.replaceChildren(...shown.panels.map((panelOf) => picture(panelOf, each)));
    numbers.replaceChildren(...caseNumbers(each));
  }

  const keys = (event) => {
    if (["SELECT", "INPUT"].includes(event.target.tagName)) return;
    const action = {
      ArrowLeft: () => step(-1),
      ArrowRight: () => step(1),
      ArrowUp: () => stepSlice(1),
      ArrowDown: () => stepSlice(-1),
    }[event.key];
    if (!action) return;
    action();
    event.preventDefault();
    speak(`${titleOf(cases[state.case])}, slice ${position.textContent}`);
  };
  const viewer = html(
    "div",
    {
      class: "viewer",
      tabindex: "0",
      role: "group",
      "aria-label": "Case pictures. Left and right change the case, up and down the slice.",
      on: { keydown: keys },
    },
    controls(
      html(
        "button",
        { type: "button", class: "quiet", id: "previous-case", on: { click: () => step(-1) } },
        "← Previous",
      ),
      list,
      html("button", { type: "button", class: "quiet", id: "next-case", on: { click: () => step(1) } }, "Next →"),
    ),
    sliderRow,
    pictures,
    swatches([...data.class_names.map((name, index) => [classColour(index), name]), IGNORED_COLOUR]),
    numbers,
  );
  show(0);
  openCase = (id) => {
    const index = cases.findIndex((each) => each.case === id);
    if (index < 0) return;
    show(index);
    document.getElementById("browser").scrollIntoView();
    viewer.focus({ preventScroll: true });
  };
  return section(
    "browser",
    "Look at the cases",
    `${capital(plural(cases.length, channels.length ? "channel" : "case"))} ${channels.length ? "of cases " : ""}from the test sets. Left and right arrow keys change the case${data.spatial_rank === 3 ? ", up and down the slice" : ""}.`,
    viewer,
  );
}

function picture({ name, picture: code }, each) {
  const [title, key] = PANELS[name] ?? [capital(name)];
  return html(
    "figure",
    { class: "picture" },
    html("img", { src: `data:image/png;base64,${code}`, alt: `${title} of ${each.case}` }),
    html("figcaption", {}, title, key ? key() : null),
  );
}

function titleOf(each) {
  const name = each.channel ? `${each.case}, ${each.channel}` : each.case;
  return each.title ? `${name} (${each.title})` : name;
}

// Numbers named "x before" and "x after" become one line "x: before → after".
function caseNumbers(each) {
  const entries = Object.entries(each.numbers ?? {});
  const read = new Map(entries);
  return entries
    .filter(([name]) => !(name.endsWith(" after") && read.has(name.replace(/ after$/, " before"))))
    .map(([name, value]) => {
      const base = name.replace(/ before$/, "");
      const later = read.get(`${base} after`);
      const paired = name.endsWith(" before") && later !== undefined;
      return html(
        "div",
        {},
        html("dt", {}, metricOf.get(base)?.name ?? capital(paired ? base : name)),
        html(
          "dd",
          {},
          paired ? `${fixed(value, decimalsFor([value]))} → ${fixed(later, decimalsFor([value]))}` : brief(value),
        ),
      );
    });
}
