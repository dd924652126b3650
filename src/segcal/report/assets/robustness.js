// Other conditions: shifted data, and other numbers of bins, calibration cases or ensemble members.
function shiftSection() {
  if (!study.shift?.length) return null;
  const conditions = [
    { name: "original", table: summaries, changes: differences },
    ...study.shift.map((each) => ({
      name: each.name,
      table: tableOf(each.summary, "method", "region", "metric"),
      changes: tableOf(
        each.differences.filter((row) => row.baseline === BASELINE),
        "method",
        "region",
        "metric",
      ),
      against: tableOf(
        each.differences.filter((row) => row.baseline !== BASELINE),
        "method",
        "region",
        "metric",
      ),
    })),
  ];
  const known = (id) => study.shift.some((each) => each.summary.some((row) => row.metric === id));
  const metrics = metricOptions.filter(([id]) => known(id));
  if (!metrics.length) return null;
  let metric = metrics.some(([id]) => id === CRITERION) ? CRITERION : metrics[0][0];
  const rowOf = (key, index) => lookUp(conditions[index].table, key, mainRegion, metric);
  const interval = (row, decimals) => `${fixed(row.low, decimals)} to ${fixed(row.high, decimals)}`;
  const drawn = lineChart(() => ({
    label: `${metricName(metric)} on shifted data. Use the arrow keys to go through the points.`,
    stops: conditions.map(({ name }) => ({ text: name, short: clipped(name, 16) })),
    yLabel: metricName(metric),
    value: (key, index) => rowOf(key, index)?.mean,
    range: (key, index) => [rowOf(key, index)?.low, rowOf(key, index)?.high],
    rows: (key, index) => {
      const row = rowOf(key, index);
      const decimals = decimalsFor([row.mean]);
      return [
        [metricName(metric), fixed(row.mean, decimals)],
        ["95% interval", interval(row, decimals)],
      ];
    },
  }));
  const place = html("div", {});
  const refresh = () => {
    const decimals = decimalsFor(working.map((method) => rowOf(method.key, 0)?.mean));
    place.replaceChildren(shiftTable(conditions, metric, decimals));
    drawn.redraw();
  };
  refresh();
  return section(
    "shift",
    "When the data changes",
    "The same calibrators, tested on different data without refitting. Thin lines are 95% intervals.",
    controls(
      chooser("Metric", metrics, metric, (id) => {
        metric = id;
        refresh();
      }),
    ),
    methodChips(),
    drawn.host,
    html("details", {}, html("summary", {}, "All methods as a table"), place),
  );
}

// Original and shifted data side by side. Methods that are worse than uncalibrated, or than ts, are marked.
function shiftTable(conditions, metric, decimals) {
  const cell = (key, { table, changes, against }) => {
    const row = lookUp(table, key, mainRegion, metric);
    if (!row) return html("td", {}, "–");
    const verdict = (rows) => lookUp(rows ?? new Map(), key, mainRegion, metric);
    const words = [verdict(changes), verdict(against)]
      .filter((change) => change?.verdict === "worse")
      .map((change) => (change.baseline === BASELINE ? "worse than uncalibrated" : `worse than ${change.baseline}`));
    return html(
      "td",
      { class: words.length ? "harm" : "" },
      html("span", {}, fixed(row.mean, decimals)),
      html("span", { class: "fine" }, `${fixed(row.low, decimals)} to ${fixed(row.high, decimals)}`),
      words.map((text) => html("span", { class: "word below" }, text)),
    );
  };
  return gridTable({
    label: "Original and shifted data side by side",
    caption: `${metricName(metric)}: ${direction(metric)}. A method is marked as worse if the 95% interval of the paired difference says so.`,
    kind: "matrix",
    heads: ["Method", ...conditions.map(({ name }) => html("th", { scope: "col" }, name))],
    rows: working.map((method) => [method.name, conditions.map((condition) => cell(method.key, condition))]),
  });
}

const SENSITIVITY = {
  bins: [
    "bins",
    "Number of bins of the ECE",
    "The measured ECE depends on the number of bins; the order of the methods should not.",
  ],
  size: ["cases", "Calibration cases", "How many cases a method needs before it helps."],
  members: ["members", "Ensemble members", "How the number of ensemble members changes the calibration."],
};

function sensitivitySection() {
  const kinds = Object.keys(SENSITIVITY).filter((kind) => study.sensitivity?.[kind]?.length);
  if (!kinds.length) return null;
  const state = { kind: kinds[0], metric: "ece" };
  const words = html("p", { class: "lead" });
  const hasLoss = () => study.sensitivity[state.kind].some((row) => row.nll !== undefined);
  const drawn = lineChart(() => {
    const [field, title] = SENSITIVITY[state.kind];
    const rows = study.sensitivity[state.kind];
    const metric = hasLoss() ? state.metric : "ece";
    const stops = [...new Set(rows.map((row) => row[field]))].sort((a, b) => a - b);
    const found = tableOf(rows, "method", field);
    const rowOf = (key, index) => lookUp(found, key, stops[index]);
    return {
      label: `${metric.toUpperCase()} by ${title.toLowerCase()}. Use the arrow keys to go through the points.`,
      stops: stops.map((at) => ({ at, text: String(at) })),
      log: stops[0] > 0 && stops[stops.length - 1] / stops[0] > 4,
      xLabel: title,
      yLabel: metric.toUpperCase(),
      value: (key, index) => rowOf(key, index)?.[metric],
      rows: (key, index) =>
        ["ece", "nll"]
          .filter((id) => rowOf(key, index)?.[id] !== undefined)
          .map((id) => [id.toUpperCase(), brief(rowOf(key, index)[id])]),
    };
  });
  const metricChooser = segments(
    "Measure",
    [
      ["ece", "ECE"],
      ["nll", "NLL"],
    ],
    state.metric,
    (metric) => {
      state.metric = metric;
      refresh();
    },
  );
  const refresh = () => {
    words.textContent = SENSITIVITY[state.kind][2];
    metricChooser.hidden = !hasLoss();
    drawn.redraw();
  };
  refresh();
  return section(
    "sensitivity",
    "Does it depend on our choices?",
    null,
    words,
    controls(
      segments(
        "Vary",
        kinds.map((kind) => [kind, SENSITIVITY[kind][1]]),
        state.kind,
        (kind) => {
          state.kind = kind;
          refresh();
        },
      ),
      metricChooser,
    ),
    methodChips(),
    drawn.host,
  );
}
