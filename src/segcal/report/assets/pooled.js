// Pooled values beside per-image ones, and scores in two parts.
const SPLIT = { nll: "NLL", brier: "Brier score" };

function pooledSection() {
  const eces = working.map((method) => lookUp(summaries, method.key, mainRegion, "ece")).filter(Boolean);
  const scores = tableOf(study.scores, "method", "score");
  const groups = [];
  if (eces.some((row) => !Number.isNaN(numeric(row.pooled)))) {
    const row = (method) => lookUp(summaries, method.key, mainRegion, "ece") ?? {};
    groups.push({
      name: metricName("ece"),
      decimals: decimalsFor(eces.map(({ mean }) => mean)),
      columns: [
        ["per case", (method) => [row(method).mean, row(method).low, row(method).high]],
        ["pooled", (method) => [row(method).pooled, row(method).pooled_low, row(method).pooled_high]],
      ],
    });
  }
  for (const [score, name] of Object.entries(SPLIT)) {
    if (!study.scores.some((row) => row.score === score)) continue;
    const row = (method) => lookUp(scores, method.key, score) ?? {};
    groups.push({
      name,
      decimals: decimalsFor(working.map((method) => row(method).pooled)),
      columns: [
        ["pooled", (method) => [row(method).pooled]],
        ["calibration", (method) => [row(method).calibration, row(method).low, row(method).high]],
        ["refinement", (method) => [row(method).refinement]],
      ],
    });
  }
  if (!groups.length) return null;
  const columns = groups.flatMap(({ name, decimals, columns: own }) =>
    own.map(([part, values]) => {
      const known = working.map((method) => numeric(values(method)[0])).filter((value) => !Number.isNaN(value));
      return { name, part, values, decimals, best: fixed(Math.min(...known), decimals) };
    }),
  );
  const cell = (method, { values, decimals, best }) =>
    html("td", { class: fixed(values(method)[0], decimals) === best ? "best" : "" }, withRange(decimals, ...values(method)));
  return section(
    "pooled",
    "All together or case by case",
    `Pooled values are of all test ${voxels} together, the others means over the test cases${channels.length ? "; both are means over the channels" : ""}.`,
    html(
      "p",
      { class: "lead" },
      "A network that gives an object 60% is right or wrong on all of it in one case, so confidence and accuracy differ there even if it is right on 60% of such objects. A sharper network puts its doubt on such objects instead of spreading it thinly: its per-case ECE can be larger than that of a vague one though it is as well calibrated, while its NLL and Brier score are lower.",
    ),
    study.scores.length
      ? html(
          "p",
          { class: "lead" },
          "NLL and Brier score are calibration plus refinement: calibration is what the score would save if every bin of the confidence (NLL) or of the probability of each class (Brier score) had its true frequency for its confidence, refinement is the rest.",
        )
      : null,
    gridTable({
      label: "Pooled and per-case ECE, and NLL and Brier score in two parts",
      caption: `${regionName(mainRegion)}, with 95% intervals. The lowest value of each column is marked.`,
      kind: "matrix",
      heads: [
        "Method",
        ...columns.map(({ name, part }) => html("th", { scope: "col" }, name, html("span", { class: "fine" }, part))),
      ],
      rows: working.map((method) => [method.name, columns.map((column) => cell(method, column))]),
    }),
  );
}
