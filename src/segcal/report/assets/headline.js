// What was wrong, what fixes it, how certain that is, and what to do next. The words come from the study.
function headlineSection() {
  const { recommendation } = study;
  const advised = recommendation.method;
  const notices = [...new Set([...recommendation.caveats, ...study.warnings])];
  return html(
    "section",
    { id: "top", class: "headline" },
    html("p", { class: "eyebrow" }, "Calibration study"),
    html("h1", {}, study.about.title || data.name),
    html("p", { class: "facts" }, factsLine()),
    headlineWords(advised),
    cards(),
    after !== BASELINE ? html("p", { class: "fine" }, afterText(advised)) : null,
    html(
      "div",
      { class: "advice" },
      html(
        "div",
        { class: "words" },
        recommendation.sentences.length ? html("h3", {}, "The evidence") : null,
        html(
          "ul",
          {},
          recommendation.sentences.map((sentence) => html("li", {}, sentence)),
        ),
      ),
      html("div", {}, advised && advised !== BASELINE ? deployBox(advised) : null, noticeBox(notices)),
    ),
  );
}

function factsLine() {
  const created = study.timings?.created;
  return [
    data.name,
    plural(data.cases, "case"),
    channels.length ? plural(channels.length, "channel") : `${whole(data.num_classes)} classes`,
    data.spatial_rank === 3 ? "3D" : "2D",
    data.members ? plural(data.members, "ensemble member") : null,
    plural(working.length - 1, "method"),
    plural(study.splits.length, "repeat"),
    created ? created.slice(0, 10) : null,
  ]
    .filter(Boolean)
    .join(" · ");
}

// What is wrong and what to use; then what that costs.
function headlineWords(advised) {
  const plain = advised ? `${nameOf(advised)} is recommended.` : "No method met the constraints.";
  const told = study.recommendation.headline ?? [{ text: plain, tone: "plain" }];
  const paragraph = (sentences, name) =>
    sentences.length
      ? html(
          "p",
          { class: name },
          sentences.map(({ text, tone }, index) => [index ? " " : "", html("span", { class: tone }, text)]),
        )
      : null;
  return [paragraph(told.slice(0, 2), "verdict"), paragraph(told.slice(2), "verdict cost")];
}

function afterText(advised) {
  const name = `"Before" is the uncalibrated network, "after" is ${nameOf(after)}`;
  const means = "the numbers are means over test cases that were not used for fitting";
  return after === advised
    ? `${name}; ${means}.`
    : `${name}, the best on the validation cases, though not recommended; ${means}.`;
}

function flipped(key) {
  const row = lookUp(flips, key);
  return row ? row.harmful + row.beneficial + row.neutral : NaN;
}

function cards() {
  const before = totals(lookUp(reliabilities, BASELINE, mainRegion, null));
  const now = totals(lookUp(reliabilities, after, mainRegion, null));
  const own = after !== BASELINE;
  const moved = lookUp(flips, after);
  return html(
    "div",
    { class: "cards" },
    before.count
      ? html(
          "div",
          { class: "card" },
          html("h3", {}, "Confidence and accuracy"),
          html(
            "dl",
            { class: "pairs" },
            pair("Before", before),
            own ? pair("After", now, Math.abs(now.sure - now.right) < Math.abs(before.sure - before.right)) : null,
          ),
          html("p", { class: "fine" }, `Means over ${shortCount(before.count)} test ${voxels}.`),
        )
      : null,
    [firstMetric("nll"), firstMetric("ece")]
      .filter((id, index, all) => id && all.indexOf(id) === index)
      .map((id) => numberCard(id, own)),
    own && moved
      ? html(
          "div",
          { class: "card" },
          html("h3", {}, "Labels changed"),
          html("p", { class: "big" }, flipped(after) === 0 ? "None" : share(flipped(after), moved.compared)),
          html(
            "p",
            { class: "fine" },
            flipped(after) === 0
              ? `The mask stays exactly the same in all ${shortCount(moved.compared)} test ${voxels}.`
              : `${whole(moved.harmful)} for the worse, ${whole(moved.beneficial)} for the better, ${whole(moved.neutral)} from wrong to wrong, of ${shortCount(moved.compared)}.`,
          ),
        )
      : null,
  );
}

function pair(when, { sure, right }, closer = false) {
  const name = `middle ${closer ? "better" : ""}`;
  return [
    html("dt", {}, when),
    html(
      "dd",
      {},
      html("span", { class: name }, share(sure, 1)),
      " confidence, ",
      html("span", { class: name }, share(right, 1)),
      " accuracy",
    ),
  ];
}

function numberCard(metric, own) {
  const before = lookUp(summaries, BASELINE, mainRegion, metric);
  const now = lookUp(summaries, after, mainRegion, metric);
  if (!before || !now || Number.isNaN(numeric(before.mean))) return null;
  const decimals = decimalsFor([before.mean]);
  const values = own ? [caseValues(BASELINE, mainRegion, metric), caseValues(after, mainRegion, metric)] : [];
  const count = values[0] && values[1] ? improved(metric, values[0], values[1]) : null;
  const verdict = own ? verdictOf(after, mainRegion, metric) : null;
  const range = (row) => `${fixed(row.low, decimals)} to ${fixed(row.high, decimals)}`;
  return html(
    "div",
    { class: "card" },
    html("h3", {}, metricName(metric), binsOf(metric), metric === CRITERION ? ", the selection metric" : ""),
    html(
      "p",
      { class: "big" },
      html("span", { class: own ? "was" : "now" }, fixed(before.mean, decimals)),
      own
        ? [
            html("span", { class: "arrow", "aria-label": "to" }, "→"),
            html("span", { class: `now ${verdict ?? ""}` }, fixed(now.mean, decimals)),
            verdict === "worse" ? html("span", { class: "worse word" }, "worse") : null,
          ]
        : null,
    ),
    html(
      "p",
      { class: "fine" },
      own ? `95% intervals ${range(before)}, then ${range(now)}.` : `95% interval ${range(before)}.`,
    ),
    metric === "ece" ? pooledLine(own ? [before, now] : [before], decimals) : null,
    count
      ? html(
          "p",
          { class: "fine strong" },
          verdict === "worse"
            ? `Worse in ${count.worse} of ${plural(count.total, "case")}${count.better ? `, better in ${count.better}` : ""}.`
            : `Better in ${count.better} of ${plural(count.total, "case")}.`,
        )
      : null,
  );
}

// The means are over cases; studies of earlier versions have no interval of the pooled value.
function pooledLine(rows, decimals) {
  const text = ({ pooled, pooled_low: low, pooled_high: high }) =>
    fixed(pooled, decimals) + (Number.isNaN(numeric(low)) ? "" : ` (${fixed(low, decimals)} to ${fixed(high, decimals)})`);
  if (rows.some(({ pooled }) => Number.isNaN(numeric(pooled)))) return null;
  return html("p", { class: "fine" }, `Pooled over all ${voxels}: ${rows.map(text).join(", then ")}.`);
}

function improved(metric, before, now) {
  let better = 0,
    worse = 0,
    total = 0;
  before.forEach((value, index) => {
    const change = badness(metric, now[index]) - badness(metric, value);
    if (Number.isNaN(change)) return;
    total += 1;
    better += change < 0;
    worse += change > 0;
  });
  return { better, worse, total };
}

function deployBox(advised) {
  const { file } = study.recommendation;
  const { pooling } = methodOf.get(advised);
  const how = {
    probs: "with the members' probabilities averaged",
    logits: "with the members' logits averaged",
    single: "for a single model, not the ensemble",
  }[pooling];
  if (!file)
    return html(
      "aside",
      { class: "deploy" },
      html("h3", {}, "Use it"),
      html("p", {}, `This study did not save it. Fit it with segcal fit --method ${methodOf.get(advised).id}.`),
    );
  const command = `segcal apply ${file} NEW_DATA/ -o calibrated/`;
  const button = html("button", { type: "button", class: "quiet", on: { click: () => copy(command, button) } }, "Copy");
  return html(
    "aside",
    { class: "deploy" },
    html("h3", {}, "Use it"),
    html(
      "p",
      {},
      `${nameOf(advised)}, fitted on the calibration and validation cases, is saved next to this page as `,
      html("a", { href: file, download: true }, file),
      how ? ` (${how})` : "",
      ". In this folder, run",
    ),
    html("div", { class: "command" }, commandLine(command), button),
  );
}

function copy(text, button) {
  const done = () => {
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  };
  // Pages opened from disk may not use the clipboard. Then the text is selected, to be copied by hand.
  const select = () => getSelection().selectAllChildren(button.previousElementSibling);
  navigator.clipboard ? navigator.clipboard.writeText(text).then(done, select) : select();
}

function noticeBox(texts) {
  if (!texts.length) return null;
  const items = (some) =>
    html(
      "ul",
      {},
      some.map((text) => html("li", {}, text)),
    );
  const [first, rest] = [texts.slice(0, 6), texts.slice(6)];
  return html(
    "aside",
    { class: "notice" },
    html("h3", {}, "Before you rely on this"),
    items(first),
    rest.length ? html("details", {}, html("summary", {}, `${rest.length} more`), items(rest)) : null,
  );
}
