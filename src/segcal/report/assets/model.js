// The study, and look-ups into it that all sections share.
const study = JSON.parse(document.getElementById("study").textContent);

const BASELINE = "uncalibrated";
// The metric that methods are chosen by, on validation cases.
const CRITERION = "nll";
const data = study.about.data;
// For multi-label data: every channel is a two-class problem of its own.
const channels = data.channel_names ?? [];
const voxels = data.spatial_rank === 3 ? "voxels" : "pixels";
const methods = study.methods;
const working = methods.filter((method) => method.status === "ok");
const methodOf = new Map(methods.map((method) => [method.key, method]));
const metricOf = new Map(study.metrics.map((metric) => [metric.id, metric]));

function tableOf(rows, ...names) {
  return new Map(rows.map((row) => [names.map((name) => row[name]).join("\n"), row]));
}

function lookUp(table, ...values) {
  return table.get(values.join("\n"));
}

const summaries = tableOf(study.summary, "method", "region", "metric");
const differences = tableOf(study.differences, "method", "region", "metric");
const flips = tableOf(study.flips, "method");
const reliabilities = tableOf(study.reliability, "method", "region", "class");
const regions = [...new Set(study.summary.map((row) => row.region))];
const measured = study.metrics.filter((metric) => study.summary.some((row) => row.metric === metric.id));

// What the page calls "after": the recommended method, or the best one if the advice is to leave the scores uncalibrated.
const after =
  [study.recommendation.shown, study.recommendation.method, study.recommendation.best, working[working.length - 1]?.key].find(
    (key) => key && key !== BASELINE && methodOf.get(key)?.status === "ok",
  ) ?? BASELINE;

const mainRegion = regions.includes("everything") ? "everything" : regions[0];

function firstMetric(...wanted) {
  return wanted.find((id) => measured.some((metric) => metric.id === id)) ?? measured[0]?.id;
}

function nameOf(key) {
  return methodOf.get(key)?.name ?? key;
}

function regionName(region) {
  const band = study.bands.find((row) => row.band === region);
  if (!band) return capital(region);
  return `${bandName(band)} from a boundary`;
}

function bandName(band) {
  const unit = band.unit === "mm" ? "mm" : voxels;
  return band.high === null || band.high === "inf" ? `${band.low}+ ${unit}` : `${band.low}–${band.high} ${unit}`;
}

function metricName(id) {
  return metricOf.get(id)?.name ?? id;
}

// ", 15 bins" for a metric that counts in bins.
function binsOf(id) {
  const bins = metricOf.get(id)?.bins;
  return bins ? `, ${plural(bins, "bin")}` : "";
}

// Smaller is better: what to sort and compare by.
function badness(metric, value) {
  const better = metricOf.get(metric)?.better;
  const number = numeric(value);
  return better === "higher" ? -number : better === "zero" ? Math.abs(number) : number;
}

// What the paired difference from the uncalibrated network says: "better", "worse", "unclear", or nothing.
function verdictOf(key, region, metric) {
  return lookUp(differences, key, region, metric)?.verdict ?? null;
}

function direction(metric) {
  return (
    { lower: "lower is better", higher: "higher is better", zero: "nearer to 0 is better" }[
      metricOf.get(metric)?.better
    ] ?? "neither way is better"
  );
}

// Cases that the page has pictures of.
const pictured = new Set(study.browser.filter((each) => each.slices.length).map((each) => each.case));

const methodOptions = working.map((method) => [method.key, method.name]);
const regionOptions = regions.map((region) => [region, regionName(region)]);
const metricOptions = measured.map((metric) => [metric.id, metric.name]);

// Values per case are packed as 16-bit codes between the smallest and the largest value of a metric in a region.
const UNDEFINED_CODE = 65535;
const INFINITE_CODE = 65534;
const caseBlocks = tableOf(study.cases.blocks, "region", "metric");

function caseValues(method, region, metric) {
  const block = lookUp(caseBlocks, region, metric);
  const row = study.cases.methods.indexOf(method);
  if (!block || row < 0) return null;
  if (!block.decoded) {
    const bytes = Uint8Array.from(atob(block.codes), (letter) => letter.charCodeAt(0));
    block.decoded = new DataView(bytes.buffer);
  }
  return study.cases.ids.map((_, index) => {
    const code = block.decoded.getUint16(2 * (row * study.cases.ids.length + index), true);
    return code === UNDEFINED_CODE ? NaN : code === INFINITE_CODE ? Infinity : block.low + block.step * code;
  });
}

// Mean confidence and accuracy of a whole reliability curve.
function totals(bins) {
  let count = 0,
    confidence = 0,
    correct = 0,
    gap = 0;
  for (let i = 0; bins && i < bins.count.length; i++) {
    if (!bins.count[i]) continue;
    count += bins.count[i];
    confidence += bins.count[i] * bins.confidence[i];
    correct += bins.count[i] * bins.accuracy[i];
    gap += bins.count[i] * Math.abs(bins.confidence[i] - bins.accuracy[i]);
  }
  return { count, sure: confidence / count, right: correct / count, ece: gap / count };
}

// Colour, dash and shape of a method, the same in every chart.
const others = working.filter((method) => method.key !== BASELINE && method.key !== after).map((method) => method.key);

function styleOf(key) {
  if (key === BASELINE) return { colour: "series-baseline", dash: "5 4", shape: 0 };
  if (key === after) return { colour: "series-after", dash: null, shape: 0 };
  const index = others.indexOf(key);
  return {
    colour: `series-${index % 6}`,
    dash: [null, "2 3", "8 3"][Math.floor(index / 6) % 3],
    shape: 1 + (index % 3),
  };
}
