// Where the network is overconfident and where underconfident, before and after.
const GAUGE = {
  none: "It hardly varies here, so calibrators that depend on it are safe.",
  some: "It varies somewhat here: prefer translation-invariant calibrators, which ignore it.",
  high: "It varies a lot here: calibrators that are not translation invariant may depend on it and fail on new data.",
  undefined: "It could not be measured here.",
};

function diagnosisSection() {
  if (!study.diagnosis[BASELINE]) return null;
  let method = after;
  const drawn = chart((width) => drawDiagnosis(width, method));
  const words = html("ul", { class: "findings" });
  const refresh = () => {
    words.replaceChildren(...findings(method).map((text) => html("li", {}, text)));
    drawn.redraw();
  };
  refresh();
  const known = methodOptions.filter(([key]) => study.diagnosis[key] && key !== BASELINE);
  const threshold = study.diagnosis[BASELINE].threshold;
  return section(
    "diagnosis",
    "What exactly is wrong",
    `NLL − entropy compares how surprised the network is by the labels with how uncertain it claims to be. Above 0 it is overconfident, below 0 underconfident; within ±${Number(threshold)} it counts as balanced. Classes are the predicted ones; the cases are the test cases of the first repeat.`,
    known.length
      ? controls(
          chooser("After", known, method, (key) => {
            method = key;
            refresh();
          }),
        )
      : null,
    words,
    beforeAfterKey(),
    drawn.host,
  );
}

function beforeAfterKey() {
  const dot = (colour, kind) =>
    svg(
      "svg",
      { class: colour, width: 14, height: 14, "aria-hidden": "true" },
      svg("circle", { class: `dot ${kind}`, cx: 7, cy: 7, r: 5 }),
    );
  return html("p", { class: "fine key" }, dot("series-baseline", "hollow"), "before", dot("series-after", ""), "after");
}

function findings(method) {
  const of = (key) => study.diagnosis[key];
  const images = (key) => {
    const counts = of(key).images;
    const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
    const named = Object.entries(counts)
      .filter(([, count]) => count)
      .map(([word, count]) => `${count} ${word}`);
    return `${named.length ? listed(named) : "none"} of ${plural(total, "case")}`;
  };
  const verdict = (key, scope) => {
    if (!channels.length) return `${of(key).set.verdict}${scope}: ${images(key)}`;
    const words = new Map();
    for (const [name, { set }] of Object.entries(of(key).channels)) {
      words.set(set.verdict, [...(words.get(set.verdict) ?? []), name]);
    }
    return [...words].map(([word, names]) => `${word} in ${listed(names)}`).join("; ");
  };
  const { free_energy_std: spreadOf, risk } = of(BASELINE).gauge;
  return [
    `Before, the network is ${verdict(BASELINE, " overall")}.`,
    of(method) && method !== BASELINE ? `After ${nameOf(method)}, it is ${verdict(method, "")}.` : null,
    // The scores of a channel have no offset.
    channels.length
      ? null
      : `Free energy, the offset of the logits that does not affect probabilities, has a spread of ${brief(spreadOf)} nats within a case. ${GAUGE[risk]}`,
  ].filter(Boolean);
}

function drawDiagnosis(width, method) {
  const of = (key) => study.diagnosis[key] ?? { classes: {}, bands: {} };
  const rows = [
    [channels.length ? "Mean over channels" : "The whole set", of(BASELINE).set, of(method).set],
    ...channels.map((name) => [name, of(BASELINE).channels[name].set, of(method).channels?.[name].set]),
    ...Object.keys(of(BASELINE).classes).map((name) => [name, of(BASELINE).classes[name], of(method).classes?.[name]]),
    ...Object.keys(of(BASELINE).bands).map((name) => [
      regionName(name),
      of(BASELINE).bands[name],
      of(method).bands?.[name],
    ]),
  ].filter(([, before]) => before && Number.isFinite(numeric(before.balance)));
  const narrow = width < 560;
  const line = narrow ? 44 : 30;
  const left = narrow ? 16 : 230;
  const height = rows.length * line + 64;
  const x = axisFor(
    rows.flatMap(([, before, now]) => [before.balance, now?.balance]),
    { zero: true, label: "NLL − entropy (nats)", count: narrow ? 4 : 6 },
  );
  const plot = frame({
    width,
    height,
    left,
    top: 18,
    x,
    y: { low: 0, high: 1, ticks: [] },
    label: "Over- and underconfidence before and after. Use the arrow keys to go through the rows.",
  });
  const threshold = study.diagnosis[BASELINE].threshold;
  const zone = [Math.max(x.low, -threshold), Math.min(x.high, threshold)].map(plot.across);
  plot.root.append(
    svg("rect", {
      class: "zone",
      x: zone[0],
      width: Math.max(1, zone[1] - zone[0]),
      y: plot.top,
      height: plot.bottom - plot.top,
    }),
    svg("line", { class: "zero", x1: plot.across(0), x2: plot.across(0), y1: plot.top, y2: plot.bottom }),
    svg("text", { class: "corner over", x: plot.right, y: 12, "text-anchor": "end" }, "overconfident →"),
    x.low < 0 ? svg("text", { class: "corner under", x: plot.left, y: 12 }, "← underconfident") : null,
  );
  const points = rows.map(([name, before, now], index) => {
    const y = plot.top + (index + 0.5) * line + (narrow ? 8 : 0);
    const from = plot.across(numeric(before.balance));
    const known = now && Number.isFinite(numeric(now.balance));
    const to = known ? plot.across(numeric(now.balance)) : from;
    const node = svg(
      "g",
      { class: "row" },
      svg("rect", { class: "shade", x: 0, width, y: y - line / 2 - (narrow ? 8 : 0), height: line }),
      narrow
        ? svg("text", { class: "row-name", x: left, y: y - 13 }, name)
        : svg("text", { class: "row-name", x: left - 14, y, dy: "0.32em", "text-anchor": "end" }, clipped(name, 30)),
      svg("line", { class: "dumbbell", x1: from, x2: to, y1: y, y2: y }),
      svg("g", { class: "series-baseline" }, svg("circle", { class: "dot hollow", cx: from, cy: y, r: 5 })),
      known && method !== BASELINE
        ? svg("g", { class: "series-after" }, svg("circle", { class: "dot", cx: to, cy: y, r: 5 }))
        : null,
    );
    plot.root.append(node);
    const text = (finding) => `${signed(finding.balance, 3)}, ${finding.verdict}`;
    return {
      x: to,
      y,
      node,
      title: name,
      rows: [
        ["Before", text(before)],
        ...(known ? [["After", text(now)]] : []),
        [capital(voxels), whole(before.voxels)],
      ],
    };
  });
  return explorable(plot.root, points);
}
