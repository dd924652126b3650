// Does better calibration cost segmentation quality?
const QUALITY = ["dsc", "miou", "accuracy", "volume-dice", "surface-dice", "hd95", "asd"];

function tradeoffSection() {
  const quality = measured.filter((metric) => QUALITY.includes(metric.id.replace(/\[.*/, "")));
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
    "Does honesty cost accuracy?",
    "Each mark is a method. Left is better calibrated; a mark that sinks pays for it with worse segmentation. Methods that keep every label stay level with the uncalibrated network. Thin lines are 95% intervals.",
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
    height: narrow ? 340 : 420,
    label: `${metricName(state.x)} against ${metricName(state.y)} of ${found.length} methods. Arrow keys walk through the methods.`,
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

// Writes each name beside its mark where it covers no other mark or name, farther away with a line if it must.
function placeLabels(plot, points) {
  const taken = points.map(({ x, y }) => ({ x: x - 8, y: y - 8, width: 16, height: 16 }));
  const overlaps = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  const heights = [0, -18, 18, -34, 34, -50, 50, -66, 66, -82, 82, -98, 98];
  for (const { each, x, y } of [...points].sort((a, b) =>
    a.each.key === after ? -1 : b.each.key === after ? 1 : a.x - b.x,
  )) {
    const width = 7.2 * each.key.length + 6;
    const spots = heights.flatMap((dy) =>
      dy === 0
        ? [
            [10, 0],
            [-10 - width, 0],
          ]
        : [
            [-width / 2, dy],
            [10, dy],
            [-10 - width, dy],
          ],
    );
    const spot = spots
      .map(([dx, dy]) => ({ x: x + dx, y: y + dy - 8, width, height: 16, dy }))
      .find(
        (box) =>
          box.x > plot.left &&
          box.x + width < plot.right &&
          box.y > plot.top &&
          box.y + 16 < plot.bottom &&
          !taken.some((other) => overlaps(box, other)),
      );
    if (!spot) continue;
    taken.push(spot);
    const middle = spot.x + width / 2;
    plot.root.append(
      svg(
        "g",
        { class: styleOf(each.key).colour },
        Math.abs(spot.dy) > 18
          ? svg("path", {
              class: "leader",
              d: `M${x} ${y + Math.sign(spot.dy) * 8}L${middle} ${spot.y + (spot.dy > 0 ? 0 : 16)}`,
            })
          : null,
        svg("text", { class: "line-name", x: middle, y: spot.y + 8, dy: "0.32em", "text-anchor": "middle" }, each.key),
      ),
    );
  }
}
