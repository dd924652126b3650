// The channels of multi-label data, each measured on its own. The rest of the page shows means over channels.
function channelsSection() {
  const shown = ["nll", "ece"].filter((id) => measured.some((metric) => metric.id === id));
  if (!study.channels.length || !shown.length) return null;
  const tables = study.channels.map(({ name, summary }) => ({ name, rows: tableOf(summary, "method", "region", "metric") }));
  const columns = tables.flatMap(({ name, rows }) =>
    shown.map((metric) => {
      const rowOf = (method) => lookUp(rows, method.key, mainRegion, metric);
      const means = working.map((method) => rowOf(method)?.mean);
      const decimals = decimalsFor(means);
      const best = fixed(Math.min(...means.map(numeric).filter((value) => !Number.isNaN(value))), decimals);
      return { name, metric, rowOf, decimals, best };
    }),
  );
  const cell = (method, { rowOf, decimals, best }) => {
    const row = rowOf(method);
    if (!row) return html("td", {}, "–");
    const marked = fixed(row.mean, decimals) === best ? "best" : "";
    return html("td", { class: marked }, withRange(decimals, row.mean, row.low, row.high));
  };
  return section(
    "channels",
    "Channel by channel",
    `The ${plural(channels.length, "channel")} may overlap, so each is calibrated on its own: inside or outside. Where the page names no channel, it shows means over the channels.`,
    gridTable({
      label: "NLL and ECE of all methods in every channel",
      caption: `${regionName(mainRegion)}: means over the test cases with 95% intervals. The best mean of each column is marked.`,
      kind: "matrix",
      heads: [
        "Method",
        ...columns.map(({ name, metric }) =>
          html("th", { scope: "col" }, name, html("span", { class: "fine" }, metricName(metric))),
        ),
      ],
      rows: working.map((method) => [method.name, columns.map((column) => cell(method, column))]),
    }),
  );
}
