// Ranks, and which methods differ significantly.
function statisticsSection() {
  if (!study.ranks.length) return null;
  const key = (row) => `${row.metric}\n${row.region}`;
  const first =
    study.ranks.find((row) => row.metric === firstMetric(CRITERION, "ece") && row.region === mainRegion) ?? study.ranks[0];
  let current = first;
  const words = html("p", {});
  const table = html("div", {});
  const drawn = chart((width) => drawRanks(width, current));
  const refresh = () => {
    const { friedman } = current;
    words.textContent =
      `Friedman's test over ${plural(friedman.n, data.groups ? "group" : "case")}: ${pText(friedman.p)}, ` +
      (numeric(friedman.p) < 0.05
        ? "so the methods differ."
        : "so these cases do not show that the methods differ.") +
      ` Two methods differ significantly if their mean ranks differ by more than ${fixed(current.critical_difference, 2)}; a bar joins those that do not.`;
    table.replaceChildren(differenceTable(current));
    drawn.redraw();
  };
  refresh();
  return section(
    "statistics",
    "How certain is the order?",
    "The methods are ranked in every case; 1 is best. The mean rank shows which tends to win, and the test whether that could be chance.",
    controls(
      chooser(
        "Metric and region",
        study.ranks.map((row) => [key(row), `${metricName(row.metric)}, ${regionName(row.region).toLowerCase()}`]),
        key(first),
        (value) => {
          current = study.ranks.find((row) => key(row) === value);
          refresh();
        },
      ),
    ),
    words,
    drawn.host,
    html("details", {}, html("summary", {}, "Differences from the uncalibrated network, with p-values"), table),
    sumRanks(),
  );
}

function drawRanks(width, { mean_rank: ranks, groups }) {
  const order = Object.keys(ranks)
    .filter((name) => Number.isFinite(numeric(ranks[name])))
    .sort((a, b) => ranks[a] - ranks[b]);
  const narrow = width < 560;
  const line = narrow ? 42 : 28;
  const left = narrow ? 14 : 300;
  const joined = groups
    .map((group) => group.map((name) => order.indexOf(name)).filter((place) => place >= 0))
    .filter((group) => group.length > 1);
  const gap = Math.min(12, 96 / Math.max(1, joined.length));
  const right = 24 + gap * joined.length;
  const x = {
    low: 1,
    high: Math.max(2, order.length),
    label: "Mean rank (1 is best)",
    ticks: ticksOf(1, Math.max(2, order.length), narrow ? 4 : 8),
  };
  const plot = frame({
    width,
    height: order.length * line + 60,
    left,
    right,
    top: 8,
    x,
    y: { low: 0, high: 1, ticks: [] },
    label: "Mean ranks of the methods. Use the arrow keys to go through them.",
  });
  const at = (index) => plot.top + (index + 0.5) * line + (narrow ? 8 : 0);
  joined.forEach((group, index) => {
    const column = plot.right + 18 + gap * index;
    plot.root.append(
      svg("line", {
        class: "together",
        x1: column,
        x2: column,
        y1: at(Math.min(...group)) - 6,
        y2: at(Math.max(...group)) + 6,
      }),
    );
  });
  const points = order.map((name, index) => {
    const [cx, y] = [plot.across(numeric(ranks[name])), at(index)];
    const node = svg(
      "g",
      { class: `row ${name === after ? "series-after" : name === BASELINE ? "series-baseline" : "series-plain"}` },
      svg("rect", { class: "shade", x: 0, width: plot.right, y: y - line / 2 - (narrow ? 8 : 0), height: line }),
      narrow
        ? svg(
            "text",
            { class: "row-name", x: left, y: y - 13 },
            clipped(nameOf(name), Math.floor((plot.right - left) / 7)),
          )
        : svg(
            "text",
            { class: "row-name", x: left - 14, y, dy: "0.32em", "text-anchor": "end" },
            clipped(nameOf(name), 40),
          ),
      svg("line", { class: "grid", x1: plot.left, x2: cx, y1: y, y2: y }),
      svg("circle", { class: "dot", cx, cy: y, r: 5 }),
    );
    plot.root.append(node);
    const peers = joined
      .filter((group) => group.includes(index))
      .flat()
      .filter((place) => place !== index);
    return {
      x: cx,
      y,
      node,
      title: nameOf(name),
      rows: [
        ["Mean rank", fixed(ranks[name], 2)],
        [
          "Not different from",
          peers.length ? listed([...new Set(peers)].map((place) => order[place])) : "none of the others",
        ],
      ],
    };
  });
  return explorable(plot.root, points);
}

function differenceTable({ metric, region }) {
  const rows = working
    .map((method) => [method, lookUp(differences, method.key, region, metric)])
    .filter(([, row]) => row);
  const decimals = decimalsFor(rows.map(([, row]) => row.mean));
  return gridTable({
    label: "Differences from the uncalibrated network",
    caption: `${metricName(metric)}, ${regionName(region).toLowerCase()}: paired by case${data.groups ? ", intervals and tests over groups of cases" : ""}; Wilcoxon's test, adjusted by Benjamini and Hochberg.`,
    heads: ["Method", "Change", "95% interval", "p", "p adjusted", "Cases"],
    rows: rows.map(([method, row]) => [
      method.name,
      [
        signed(row.mean, decimals),
        `${signed(row.low, decimals)} to ${signed(row.high, decimals)}`,
        pValue(row.p),
        pValue(row.p_adjusted),
        whole(row.n),
      ],
    ]),
  });
}

function sumRanks() {
  const rows = Object.entries(study.sum_rank).filter(([, rank]) => Number.isFinite(numeric(rank)));
  if (!rows.length) return null;
  rows.sort((a, b) => a[1] - b[1]);
  const perCase = study.mean_case_rank;
  const titles = ["Method", "Sum of ranks", ...(perCase ? ["Mean rank in a case"] : [])];
  return html(
    "details",
    {},
    html("summary", {}, "Ranks over all metrics and regions"),
    gridTable({
      label: "Ranks over all metrics and regions",
      caption: "Lower is better.",
      heads: titles,
      rows: rows.map(([key, rank]) => [nameOf(key), [brief(rank), ...(perCase ? [fixed(perCase[key], 2)] : [])]]),
    }),
  );
}
