// Does better calibration cost segmentation quality?
// Results of earlier versions do not say which metrics measure the segmentation.
const QUALITY = ["dsc", "miou", "accuracy", "volume-dice", "surface-dice", "hd95", "asd"];

function tradeoffSection() {
  const quality = measured.filter((metric) => metric.quality ?? QUALITY.includes(metric.id.replace(/\[.*/, "")));
  const error = measured.filter(
    (metric) => !quality.includes(metric) && metric.better === "lower" && metric.id !== "flip",
  );
  if (!quality.length || !error.length) return null;
  const state = { x: error.find(({ id }) => id === "ece")?.id ?? error[0].id, y: quality[0].id, region: mainRegion };
  const drawn = chart((width) => drawTradeoff(width, state));
  const pick = (name) => (value) => {
    state[name] = value;
    drawn.redraw();
  };
  const options = (list) => list.map(({ id, name }) => [id, name]);
  return section(
    "tradeoff",
    "Does calibration cost segmentation quality?",
    "Each mark is a method. Marks further left are better calibrated; marks further down segment worse. Methods that keep every label stay level with the uncalibrated network. Thin lines are 95% intervals.",
    controls(
      chooser("Calibration", options(error), state.x, pick("x")),
      chooser("Segmentation", options(quality), state.y, pick("y")),
      chooser("Region", regionOptions, state.region, pick("region")),
    ),
    drawn.host,
  );
}

function drawTradeoff(width, state) {
  const found = working
    .map((method) => ({
      key: method.key,
      x: lookUp(summaries, method.key, state.region, state.x),
      y: lookUp(summaries, method.key, state.region, state.y) ?? lookUp(summaries, method.key, mainRegion, state.y),
    }))
    .filter(({ x, y }) => x && y && Number.isFinite(numeric(x.mean)) && Number.isFinite(numeric(y.mean)));
  const narrow = width < 480;
  const x = axisFor(
    found.flatMap((each) => [each.x.mean, each.x.low, each.x.high]),
    {
      label: `${metricName(state.x)} (${direction(state.x)})`,
      count: narrow ? 4 : 6,
    },
  );
  const y = axisFor(
    found.flatMap((each) => [each.y.mean, each.y.low, each.y.high]),
    {
      label: metricName(state.y),
      pad: 0.08,
    },
  );
  const plot = frame({
    width,
    // A column of all names must fit.
    height: Math.max(narrow ? 340 : 420, LINE * found.length + 76),
    label: `${metricName(state.x)} against ${metricName(state.y)} of ${found.length} methods. Use the arrow keys to go through the methods.`,
    x,
    y,
    left: 62,
  });
  const clipX = (value, fallback) =>
    Math.max(plot.left, Math.min(plot.right, Number.isFinite(numeric(value)) ? plot.across(numeric(value)) : fallback));
  const clipY = (value, fallback) =>
    Math.max(plot.top, Math.min(plot.bottom, Number.isFinite(numeric(value)) ? plot.up(numeric(value)) : fallback));
  const points = found.map((each) => ({
    each,
    x: plot.across(numeric(each.x.mean)),
    y: plot.up(numeric(each.y.mean)),
  }));
  for (const { each, x: cx, y: cy } of points) {
    plot.root.append(
      svg(
        "g",
        { class: `${styleOf(each.key).colour} faint` },
        svg("line", { class: "interval", x1: clipX(each.x.low, cx), x2: clipX(each.x.high, cx), y1: cy, y2: cy }),
        svg("line", { class: "interval", x1: cx, x2: cx, y1: clipY(each.y.low, cy), y2: clipY(each.y.high, cy) }),
      ),
    );
  }
  for (const point of points) {
    const style = styleOf(point.each.key);
    point.node = svg("g", { class: style.colour }, mark(style.shape, point.x, point.y, 5.5, { class: "dot" }));
    point.title = nameOf(point.each.key);
    point.rows = [state.x, state.y].map((id, index) => {
      const row = index ? point.each.y : point.each.x;
      const decimals = decimalsFor([row.mean]);
      return [
        metricName(id),
        `${fixed(row.mean, decimals)} (${fixed(row.low, decimals)} to ${fixed(row.high, decimals)})`,
      ];
    });
    plot.root.append(point.node);
  }
  placeLabels(plot, points);
  points.sort((a, b) => a.x - b.x);
  return explorable(plot.root, points, { reach: 40 });
}

// Names stand beside their marks; where marks crowd, in a column beside the crowd with a line to each mark.
const LINE = 16;

function placeLabels(plot, points) {
  const marks = points.map(({ x, y }) => ({ x: x - 8, y: y - 8, width: 16, height: 16 }));
  const taken = [];
  const crowds = crowdsOf(points).sort((a, b) => b.length - a.length);
  for (const crowd of crowds) {
    const spots = columnSpots(plot, crowd);
    const cost = (boxes) => 100 * overlapCount(boxes, taken) + overlapCount(boxes, marks);
    const best = spots.reduce((one, other) => (cost(other.boxes) < cost(one.boxes) ? other : one));
    taken.push(...best.boxes);
    best.points.forEach((point, index) => writeLabel(plot, point, best.boxes[index], best.right, crowd.length > 1));
  }
}

// Marks whose names would get into each other's way, directly or by way of others.
function crowdsOf(points) {
  const near = (a, b) => Math.abs(a.x - b.x) < 60 && Math.abs(a.y - b.y) < 1.5 * LINE;
  const crowds = [];
  for (const point of points) {
    const [joined, apart] = [[], []];
    for (const crowd of crowds) (crowd.some((other) => near(other, point)) ? joined : apart).push(crowd);
    crowds.splice(0, crowds.length, ...apart, [point, ...joined.flat()]);
  }
  return crowds;
}

// Where a column of names may stand: right or left of the crowd, nearest first.
function columnSpots(plot, crowd) {
  const points = [...crowd].sort((a, b) => a.y - b.y || a.x - b.x);
  const middle = points.reduce((sum, { y }) => sum + y, 0) / points.length;
  const start = middle - ((points.length - 1) * LINE) / 2;
  const heights = spread(
    points.map((_, index) => start + index * LINE),
    LINE,
    plot.top + LINE / 2,
    plot.bottom - LINE / 2,
  );
  const widths = points.map(({ each }) => 7.2 * each.key.length + 6);
  const [low, high] = [Math.min(...points.map(({ x }) => x)), Math.max(...points.map(({ x }) => x))];
  const spots = [];
  for (let step = 0; step < 40; step++) {
    const away = (points.length > 1 ? 22 : 10) + 12 * step;
    for (const right of [true, false]) {
      const boxes = points.map((_, index) => ({
        x: right ? high + away : low - away - widths[index],
        y: heights[index] - LINE / 2,
        width: widths[index],
        height: LINE,
      }));
      if (boxes.every((box) => box.x >= plot.left - 40 && box.x + box.width <= plot.right + 20))
        spots.push({ points, boxes, right });
    }
  }
  // In a window too narrow for any of them, names stand over the crowd.
  const over = points.map((_, index) => ({
    x: plot.right + 20 - widths[index],
    y: heights[index] - LINE / 2,
    width: widths[index],
    height: LINE,
  }));
  return [...spots, { points, boxes: over, right: true }];
}

function overlapCount(boxes, others) {
  const overlaps = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  return boxes.reduce((sum, box) => sum + others.filter((other) => overlaps(box, other)).length, 0);
}

function writeLabel(plot, { each, x, y }, box, right, led) {
  const edge = right ? box.x : box.x + box.width;
  const height = box.y + LINE / 2;
  plot.root.append(
    svg(
      "g",
      { class: styleOf(each.key).colour },
      led ? svg("path", { class: "leader", d: `M${x} ${y}L${edge + (right ? -2 : 2)} ${height}` }) : null,
      svg(
        "text",
        { class: "line-name", x: edge, y: height, dy: "0.32em", "text-anchor": right ? "start" : "end" },
        each.key,
      ),
    ),
  );
}
