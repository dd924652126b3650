// What every number means, and how to reproduce it.
const SETTINGS = {
  fractions: "Shares of calibration, validation and test",
  tune: "Tuning",
  select: "Tuned by",
  pooling: "Pooling of members",
  preserve: "Must preserve",
  translation_invariant: "Must be translation invariant",
  robust: "Must not lose on shifted data",
};

function definitionsSection() {
  const { about, timings } = study;
  return section(
    "definitions",
    "Definitions, and how to reproduce this",
    null,
    html("h3", {}, "Metrics"),
    html(
      "dl",
      { class: "definitions" },
      measured.map((metric) => [
        html("dt", {}, metric.name, html("code", {}, metric.id), html("span", { class: "fine" }, direction(metric.id))),
        html(
          "dd",
          {},
          html("p", { class: "formula" }, metric.definition),
          metric.citation && !metric.definition.includes(metric.citation)
            ? html("p", { class: "fine" }, metric.citation)
            : null,
        ),
      ]),
    ),
    html("h3", {}, "Command"),
    about.command
      ? html("div", { class: "command" }, commandLine(about.command))
      : html("p", {}, "Made from Python with segcal.compare."),
    html("h3", {}, "Settings"),
    facts([
      ["Seed", String(about.seed)],
      [
        "Versions",
        Object.entries(about.versions)
          .map((pairOf) => pairOf.join(" "))
          .join(", "),
      ],
      [
        "Data",
        `${data.name}: ${plural(data.cases, "case")}, ${channels.length ? "channels" : "classes"} ${(channels.length ? channels : data.class_names).join(", ")}; label ${data.ignore_index} is ignored`,
      ],
      ...Object.entries(about.settings).map(([name, value]) => [
        SETTINGS[name] ?? capital(name.replaceAll("_", " ")),
        settingText(value),
      ]),
      ["Recommendation rule", study.recommendation.rule],
      ["Made", timings?.created ?? "–"],
      ["Time", timings?.total_seconds ? `${brief(timings.total_seconds)} s` : "–"],
    ]),
    html("details", {}, html("summary", {}, "Fits: how every method was fitted to the calibration cases"), fitsTable()),
    html("details", {}, html("summary", {}, "Splits: which case was used for what"), study.splits.map(splitList)),
    html("h3", {}, "Files in this folder"),
    html(
      "ul",
      { class: "files" },
      study.files.map(([name, what]) => html("li", {}, html("a", { href: name }, name), `, ${what}`)),
      study.figures.length
        ? html(
            "li",
            {},
            "Figures: ",
            study.figures.map((name, index) => [
              index ? ", " : "",
              `${name} (`,
              html("a", { href: `figures/${name}.png` }, "PNG"),
              ", ",
              html("a", { href: `figures/${name}.svg` }, "SVG"),
              ")",
            ]),
          )
        : null,
    ),
    study.notes.map((note) => html("p", { class: "fine" }, note)),
  );
}

function settingText(value) {
  if (Array.isArray(value)) return value.length ? value.join(", ") : "none";
  return value === null ? "none" : typeof value === "boolean" ? (value ? "yes" : "no") : String(value);
}

function facts(rows) {
  return html(
    "dl",
    { class: "facts-list" },
    rows.map(([name, text]) => [html("dt", {}, name), html("dd", {}, text)]),
  );
}

function fitsTable() {
  const seconds = (key) => study.timings?.per_method?.[key];
  const titles = ["Method", "Repeat", "NLL before", "NLL after", "Validation NLL", "Converged", capital(voxels), "Fit time"];
  return gridTable({
    label: "Fits",
    heads: [...titles, html("th", { scope: "col", class: "text" }, "Notes")],
    rows: study.fits.map((fit) => [
      nameOf(fit.method),
      [
        whole(fit.repeat + 1),
        brief(fit.nll_before),
        brief(fit.nll_after),
        fit.validation_nll
          ? `${brief(fit.validation_nll.mean)} ± ${brief(fit.validation_nll.standard_error)}`
          : "–",
        fit.converged ? "yes" : "no",
        shortCount(fit.voxels_used),
        seconds(fit.method) ? `${brief(seconds(fit.method).fit_seconds)} s` : "–",
        html("td", { class: "text notes" }, (fit.notes ?? []).join(" ")),
      ],
    ]),
  });
}

function splitList(split, repeat) {
  return html(
    "div",
    { class: "split" },
    html("h4", {}, `Repeat ${repeat + 1}`),
    ["calibration", "validation", "test"].map((part) =>
      html("p", {}, html("strong", {}, `${capital(part)} (${split[part].length}): `), split[part].join(", ")),
    ),
  );
}
