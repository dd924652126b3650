// All metrics of all methods in one table, as in a paper.
function allMetrics({ region }) {
  const rowOf = (method, id) => lookUp(summaries, method.key, region, id);
  const columns = measured
    .filter(({ id }) => working.some((method) => rowOf(method, id)))
    .map((metric) => {
      const means = working.map((method) => rowOf(method, metric.id)?.mean);
      const decimals = decimalsFor(means);
      const known = means.map((mean) => badness(metric.id, mean)).filter((value) => !Number.isNaN(value));
      // Values that print the same are equally good.
      const best = metric.better === "neither" ? null : fixed(Math.min(...known), decimals);
      return { metric, decimals, best };
    });
  const cell = (method, { metric, decimals, best }) => {
    const row = rowOf(method, metric.id);
    if (!row) return html("td", {}, "–");
    const harm = verdictOf(method.key, region, metric.id) === "worse";
    return html(
      "td",
      { class: harm ? "harm" : fixed(badness(metric.id, row.mean), decimals) === best ? "best" : "" },
      html("span", {}, fixed(row.mean, decimals)),
      harm ? html("span", { class: "word" }, " worse") : null,
      html("span", { class: "fine" }, `${fixed(row.low, decimals)} to ${fixed(row.high, decimals)}`),
    );
  };
  const heads = columns.map(({ metric }) =>
    html("th", { scope: "col" }, metric.name, html("span", { class: "fine" }, direction(metric.id), binsOf(metric.id))),
  );
  return gridTable({
    label: "All metrics of all methods",
    caption: `${regionName(region)}. The best mean of each column is marked; "worse" means worse than uncalibrated beyond chance.`,
    kind: "matrix",
    heads: ["Method", ...heads],
    rows: working.map((method) => [method.name, columns.map((column) => cell(method, column))]),
  });
}
