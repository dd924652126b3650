// The table of methods: one metric with its intervals drawn, or all metrics at once.
const KEEPS = {
  order: ["Keeps order", "The order of the classes stays the same everywhere, and so does every label."],
  argmax: ["Keeps labels", "Every label stays the same; the order of the other classes may change."],
  none: ["May change labels", "Labels can change."],
};

function methodsSection() {
  const state = { metric: firstMetric(CRITERION, "ece"), region: mainRegion, view: "one", sort: "value", down: false };
  const place = html("div", {});
  const refresh = () => place.replaceChildren(state.view === "one" ? oneMetric(state, refresh) : allMetrics(state));
  const metricChooser = chooser("Metric", metricOptions, state.metric, (metric) => {
    Object.assign(state, { metric, sort: "value", down: false });
    refresh();
  });
  const view = segments(
    "Show",
    [
      ["one", "One metric"],
      ["all", "All metrics"],
    ],
    state.view,
    (value) => {
      state.view = value;
      metricChooser.hidden = value === "all";
      refresh();
    },
  );
  refresh();
  return section(
    "methods",
    "Methods side by side",
    "Each value is a mean over test cases that were not used for fitting, with its 95% interval. Click a heading to sort.",
    controls(
      metricChooser,
      chooser("Region", regionOptions, state.region, (region) => {
        state.region = region;
        refresh();
      }),
      view,
    ),
    place,
  );
}

function columnsOf({ metric, region }) {
  const row = (method) => lookUp(summaries, method.key, region, metric);
  const change = (method) => lookUp(differences, method.key, region, metric);
  const decimals = decimalsFor(working.flatMap((method) => [row(method)?.mean, row(method)?.high]));
  const axis = axisFor(
    working.flatMap((method) => [row(method)?.low, row(method)?.high, row(method)?.mean]),
    { pad: 0.04 },
  );
  const reference = numeric(lookUp(summaries, BASELINE, region, metric)?.mean);
  const moved = (method) => lookUp(flips, method.key);
  const harm = (method) => harmIn({ metric, region }, method);
  return [
    { id: "name", title: "Method", text: true, value: (method) => method.name.toLowerCase(), cell: methodCell },
    {
      id: "value",
      title: metricName(metric),
      value: (method) => badness(metric, row(method)?.mean),
      cell: (method) => html("span", { class: `value ${harm(method)}` }, fixed(row(method)?.mean, decimals)),
    },
    {
      id: "interval",
      title: "95% interval",
      value: (method) => numeric(row(method)?.high) - numeric(row(method)?.low),
      wide: true,
      cell: (method) => [
        whisker(row(method), axis, reference, harm(method) ? "series-worse" : plainOrAfter(method.key)),
        html(
          "span",
          { class: "fine range" },
          row(method) ? `${fixed(row(method).low, decimals)} to ${fixed(row(method).high, decimals)}` : "–",
        ),
      ],
    },
    {
      id: "change",
      title: "Change",
      hint: "Paired difference from the uncalibrated network; p is adjusted for the number of methods.",
      value: (method) => numeric(change(method)?.mean),
      cell: (method) => changeCell(change(method), decimals),
    },
    {
      id: "pooled",
      title: "Pooled",
      hint: `All ${voxels} of all cases together, with the 95% interval.`,
      value: (method) => badness(metric, row(method)?.pooled),
      cell: (method) => withRange(decimals, row(method)?.pooled, row(method)?.pooled_low, row(method)?.pooled_high),
    },
    {
      id: "keeps",
      title: "Labels",
      text: true,
      value: (method) => Object.keys(KEEPS).indexOf(method.preserves ?? "none"),
      cell: keepsCell,
    },
    {
      id: "flips",
      title: "Changed labels",
      hint: "For the worse / for the better / from wrong to wrong.",
      value: (method) => (moved(method) ? flipped(method.key) / moved(method).compared : NaN),
      cell: (method) => flipsCell(moved(method)),
    },
    {
      id: "parameters",
      title: "Parameters",
      value: (method) => numeric(method.parameters),
      cell: (method) => whole(method.parameters),
    },
  ];
}

function harmIn({ metric, region }, method) {
  return verdictOf(method.key, region, metric) === "worse" ? "worse" : "";
}

function methodCell(method) {
  const { recommendation } = study;
  return [
    html("span", { class: "method-name" }, method.name),
    html(
      "span",
      { class: "tags" },
      html("code", {}, method.key),
      method.key === recommendation.method ? html("span", { class: "tag accent" }, "Recommended") : null,
      method.key === recommendation.best && method.key !== recommendation.method
        ? html("span", { class: "tag" }, "Best on validation")
        : null,
      method.same_as
        ? html("span", { class: "tag", title: "The same map on these cases, so it is not tested." }, `is ${method.same_as} here`)
        : null,
      method.pooling
        ? html(
            "span",
            { class: "tag" },
            { single: "single model", probs: "mean of probabilities", logits: "mean of logits" }[method.pooling],
          )
        : null,
    ),
  ];
}

function keepsCell(method) {
  const [text, hint] = KEEPS[method.preserves ?? "none"];
  const invariant = method.translation_invariant
    ? html(
        "span",
        { class: "fine", title: "Adding a constant to all logits of a voxel changes nothing." },
        "translation invariant",
      )
    : html(
        "span",
        { class: "fine", title: "Adding a constant to all logits of a voxel changes the result." },
        "depends on the offset",
      );
  return [html("span", { class: "keeps", title: hint }, text), invariant];
}

function changeCell(row, decimals) {
  if (!row) return "–";
  const tone = { better: "strong", worse: "strong worse" }[row.verdict] ?? "";
  const says = row.verdict === "worse" ? "worse, " : "";
  return [
    html("span", { class: tone }, signed(row.mean, decimals)),
    html("span", { class: "fine" }, row.p_adjusted === null ? "not tested" : `${says}${pText(row.p_adjusted)}`),
  ];
}

function flipsCell(row) {
  if (!row) return "–";
  const all = row.harmful + row.beneficial + row.neutral;
  if (all === 0) return html("span", { class: "none" }, "none");
  return [
    html("span", {}, share(all, row.compared)),
    html(
      "span",
      { class: "fine" },
      `${share(row.harmful, all).replace(/\.\d+%/, "%")} worse, ${share(row.beneficial, all).replace(/\.\d+%/, "%")} better`,
    ),
  ];
}

// Dot and whisker on the axis that all rows share; the dashed line is the uncalibrated network.
function whisker(row, axis, reference, colour) {
  const width = 170,
    height = 26;
  if (!row || !Number.isFinite(numeric(row.mean))) return null;
  const across = scaleOf(axis, 4, width - 4);
  const clip = (value, fallback) => across(Number.isFinite(numeric(value)) ? numeric(value) : fallback);
  return svg(
    "svg",
    {
      class: `whisker ${colour}`,
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      "aria-hidden": "true",
    },
    svg("line", { class: "track", x1: 4, x2: width - 4, y1: height / 2, y2: height / 2 }),
    Number.isFinite(reference)
      ? svg("line", { class: "reference", x1: across(reference), x2: across(reference), y1: 2, y2: height - 2 })
      : null,
    svg("line", {
      class: "range-line",
      x1: clip(row.low, axis.low),
      x2: clip(row.high, axis.high),
      y1: height / 2,
      y2: height / 2,
    }),
    svg("circle", { class: "dot", cx: across(numeric(row.mean)), cy: height / 2, r: 4.5 }),
  );
}

function plainOrAfter(key) {
  return key === after ? "series-after" : "series-plain";
}

function oneMetric(state, refresh) {
  const columns = columnsOf(state);
  const column = columns.find(({ id }) => id === state.sort);
  const rows = [...methods].sort((a, b) => compareRows(a, b, column, state.down));
  const sortBy = (id) => {
    Object.assign(state, { sort: id, down: state.sort === id ? !state.down : false });
    refresh();
    document.querySelector(`#methods th[data-column="${id}"] button`)?.focus();
  };
  const heads = columns.map(({ id, title, hint, text }) => {
    const sorted = state.sort === id ? (state.down ? "descending" : "ascending") : null;
    return html(
      "th",
      { scope: "col", "aria-sort": sorted, "data-column": id, class: text ? "text" : "" },
      html(
        "button",
        { type: "button", title: hint, on: { click: () => sortBy(id) } },
        title,
        html("span", { class: "sort", "aria-hidden": "true" }, sorted ? (state.down ? "↓" : "↑") : "↕"),
      ),
    );
  });
  const narrowSort = html(
    "div",
    { class: "narrow-only controls" },
    chooser(
      "Sort by",
      columns.map(({ id, title }) => [id, title]),
      state.sort,
      (id) => {
        Object.assign(state, { sort: id, down: false });
        refresh();
      },
    ),
    html(
      "button",
      { type: "button", class: "quiet", on: { click: () => sortBy(state.sort) } },
      state.down ? "↓ Reverse" : "↑ Reverse",
    ),
  );
  return html(
    "div",
    {},
    narrowSort,
    html(
      "div",
      { class: "scroll cards-when-narrow" },
      html(
        "table",
        { class: "methods" },
        html(
          "caption",
          {},
          `${metricName(state.metric)}${binsOf(state.metric)}, ${regionName(state.region).toLowerCase()}: ${direction(state.metric)}. The dashed line is the uncalibrated network; "worse" means worse than that beyond chance. Methods are chosen by ${metricName(CRITERION)} on the validation cases.`,
        ),
        html("thead", {}, html("tr", {}, heads)),
        html(
          "tbody",
          {},
          rows.map((method) => methodRow(method, columns, harmIn(state, method))),
        ),
      ),
    ),
  );
}

// Failed methods and undefined values come last whichever way the rest is sorted.
function compareRows(a, b, column, down) {
  const [first, second] = [a, b].map((method) => (method.status === "ok" ? column.value(method) : NaN));
  const missing = [first, second].map((value) => typeof value === "number" && Number.isNaN(value));
  if (missing[0] || missing[1]) return missing[0] - missing[1];
  const order = typeof first === "string" ? first.localeCompare(second) : first - second;
  return down ? -order : order;
}

function methodRow(method, columns, harm) {
  if (method.status !== "ok") {
    return html(
      "tr",
      { class: "failed", "data-method": method.key },
      html("th", { scope: "row" }, methodCell(method)),
      html(
        "td",
        { colspan: columns.length - 1, class: "text" },
        html("strong", {}, "Failed. "),
        method.reason ?? "No reason was given.",
      ),
    );
  }
  return html(
    "tr",
    { class: `${method.key === study.recommendation.method ? "chosen" : ""} ${harm}`, "data-method": method.key },
    columns.map(({ title, cell, text, wide }, index) =>
      html(
        index ? "td" : "th",
        { scope: index ? null : "row", "data-label": title, class: `${text ? "text" : ""} ${wide ? "wide" : ""}` },
        cell(method),
      ),
    ),
  );
}
