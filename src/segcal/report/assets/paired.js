// Every case before and after.
function pairedSection() {
  if (!study.cases.blocks.length || after === BASELINE) return null;
  const pairs = study.cases.blocks.map(({ region, metric }) => [region, metric]);
  const metrics = metricOptions.filter(([id]) => pairs.some(([, metric]) => metric === id));
  const state = {
    metric: metrics.some(([id]) => id === CRITERION) ? CRITERION : metrics[0][0],
    region: mainRegion,
    method: after,
  };
  const words = html("p", { class: "strong", id: "paired-words" });
  const list = html("div", {});
  const drawn = chart((width) => drawPairs(width, state));
  const refresh = () => {
    words.textContent = pairWords(state);
    list.replaceChildren(...leastHelped(state));
    drawn.redraw();
  };
  const pick = (name) => (value) => {
    state[name] = value;
    refresh();
  };
  refresh();
  return section(
    "cases",
    "Case by case",
    "Each dot is one test case: its value before (horizontal) and after (vertical). Below the diagonal the value fell. Hover over a dot, or use the arrow keys, to see which case it is.",
    controls(
      chooser("Metric", metrics, state.metric, pick("metric")),
      chooser("Region", regionOptions, state.region, pick("region")),
      chooser(
        "After",
        methodOptions.filter(([key]) => key !== BASELINE),
        state.method,
        pick("method"),
      ),
    ),
    words,
    html("div", { class: "beside" }, drawn.host, list),
  );
}

function pairsOf({ metric, region, method }) {
  const [before, now] = [caseValues(BASELINE, region, metric), caseValues(method, region, metric)];
  if (!before || !now) return [];
  return study.cases.ids
    .map((id, index) => ({ id, before: before[index], now: now[index] }))
    .filter(({ before: a, now: b }) => Number.isFinite(a) && Number.isFinite(b));
}

function pairWords(state) {
  const pairs = pairsOf(state);
  if (!pairs.length) return "These values are not in this page but in results.json.";
  if (metricOf.get(state.metric)?.better === "neither") return `${plural(pairs.length, "case")}.`;
  const changes = pairs.map(({ before, now }) => badness(state.metric, now) - badness(state.metric, before));
  const better = changes.filter((change) => change < 0).length;
  const worse = changes.filter((change) => change > 0).length;
  const same = pairs.length - better - worse;
  return `${nameOf(state.method)}: better in ${better}, worse in ${worse}${same ? `, unchanged in ${same}` : ""} of ${plural(pairs.length, "case")}.`;
}

// The cases that gained least, or lost: the ones to look at, so only those that have pictures.
function leastHelped(state) {
  if (metricOf.get(state.metric)?.better === "neither") return [];
  const worth = ({ before, now }) => badness(state.metric, now) - badness(state.metric, before);
  const pairs = pairsOf(state)
    .filter(({ id }) => pictured.has(id))
    .sort((a, b) => worth(b) - worth(a));
  if (!pairs.length) return [];
  const decimals = decimalsFor(pairs.map(({ before }) => before));
  const name = (id) => html("button", { type: "button", class: "link", on: { click: () => openCase(id) } }, id);
  return [
    html("h3", {}, "Helped least"),
    html("p", { class: "fine" }, `Of the ${plural(pairs.length, "case")} that have pictures.`),
    html(
      "table",
      { class: "plain" },
      html(
        "thead",
        {},
        html(
          "tr",
          {},
          ["Case", "Before", "After"].map((title, index) =>
            html("th", { scope: "col", class: index ? "" : "text" }, title),
          ),
        ),
      ),
      html(
        "tbody",
        {},
        pairs
          .slice(0, 8)
          .map((pair) =>
            html(
              "tr",
              {},
              html("th", { scope: "row" }, name(pair.id)),
              html("td", {}, fixed(pair.before, decimals)),
              html("td", { class: worth(pair) > 0 ? "worse" : "" }, fixed(pair.now, decimals)),
            ),
          ),
      ),
    ),
  ];
}

function drawPairs(width, state) {
  const pairs = pairsOf(state).sort((a, b) => a.before - b.before);
  const name = metricName(state.metric);
  const narrow = width < 480;
  const limits = axisFor(
    pairs.flatMap(({ before, now }) => [before, now]),
    { count: narrow ? 4 : 6 },
  );
  const height = Math.min(width, 560);
  const plot = frame({
    width,
    height,
    left: 62,
    label: `${name} before and after for ${pairs.length} cases. Use the arrow keys to go through the cases.`,
    x: { ...limits, label: `${name} before` },
    y: { ...limits, label: `${name} after` },
  });
  plot.root.append(
    svg("line", {
      class: "diagonal",
      x1: plot.across(limits.low),
      y1: plot.up(limits.low),
      x2: plot.across(limits.high),
      y2: plot.up(limits.high),
    }),
  );
  const decimals = decimalsFor(pairs.map(({ before }) => before));
  const points = pairs.map(({ id, before, now }) => {
    const change = badness(state.metric, now) - badness(state.metric, before);
    const kind = change < 0 ? "better" : change > 0 ? "worse" : "same";
    const [x, y] = [plot.across(before), plot.up(now)];
    // Worse cases are squares as well as another colour.
    const node = mark(kind === "worse" ? 1 : 0, x, y, 4.5, { class: `case ${kind}` });
    plot.root.append(node);
    return {
      x,
      y,
      node,
      title: id,
      rows: [
        ["Before", fixed(before, decimals)],
        ["After", fixed(now, decimals)],
        ["Change", `${signed(now - before, decimals)} (${kind})`],
        ...(pictured.has(id) ? [["Enter or click", "see its pictures"]] : []),
      ],
      open: pictured.has(id) ? () => openCase(id) : null,
    };
  });
  return explorable(plot.root, points, { reach: 40 });
}
