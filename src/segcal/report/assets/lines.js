// Lines of several methods over bands, corruptions or sizes, and the chips that choose the methods.
const shownMethods = new Set(
  [BASELINE, after, study.recommendation.best, "ts"].filter((key) => methodOf.get(key)?.status === "ok"),
);
const shownListeners = [];

function methodChips() {
  const inputs = new Map();
  const group = html(
    "fieldset",
    { class: "chips" },
    html("legend", {}, "Methods shown"),
    working.map((method) => {
      const style = styleOf(method.key);
      const change = () => {
        shownMethods[input.checked ? "add" : "delete"](method.key);
        shownListeners.forEach((listener) => listener());
      };
      const input = html("input", {
        type: "checkbox",
        value: method.key,
        checked: shownMethods.has(method.key),
        on: { change },
      });
      inputs.set(method.key, input);
      const swatch = svg(
        "svg",
        { class: style.colour, width: 26, height: 12, "aria-hidden": "true" },
        svg("line", { class: "line", x1: 1, x2: 25, y1: 6, y2: 6, "stroke-dasharray": style.dash }),
        mark(style.shape, 13, 6, 3.2, { class: "dot" }),
      );
      return html("label", { title: method.name }, input, html("span", {}, swatch, method.key));
    }),
  );
  shownListeners.push(() => inputs.forEach((input, key) => (input.checked = shownMethods.has(key))));
  return group;
}

// `read()` gives {label, stops: [{text, at?}], log, y: label, value(method, stop index), rows(method, stop index)} and,
// where values have intervals, range(method, stop index): then methods stand side by side at every stop.
function lineChart(read) {
  const drawn = chart((width) => drawLines(width, read()));
  shownListeners.push(drawn.redraw);
  return drawn;
}

function drawLines(width, { label, stops, log, xLabel, yLabel, value, rows, range, zeroLine }) {
  const keys = working.map((method) => method.key).filter((key) => shownMethods.has(key));
  const series = keys
    .map((key) => ({ key, values: stops.map((_, index) => numeric(value(key, index))) }))
    .filter(({ values }) => values.some(Number.isFinite));
  const narrow = width < 480;
  const ats = stops.map((stop, index) => stop.at ?? index);
  const margin = log ? 1.15 : 0.3;
  const x = {
    label: xLabel,
    log,
    low: log ? ats[0] / margin : ats[0] - margin,
    high: log ? ats[ats.length - 1] * margin : ats[ats.length - 1] + margin,
    ticks: stops.map((stop, index) => ({ at: ats[index], text: narrow ? (stop.short ?? stop.text) : stop.text })),
  };
  const ends = (key, index) => (range?.(key, index) ?? []).map(numeric).filter(Number.isFinite);
  const y = axisFor(
    series.flatMap(({ key, values }) => [...values, ...stops.flatMap((_, index) => ends(key, index))]),
    // Dots with intervals need no zero; lines alone would exaggerate without it.
    { label: yLabel, zero: !range, count: 5 },
  );
  const longest = Math.max(0, ...series.map(({ key }) => key.length));
  const right = Math.min(0.36 * width, 24 + 7.6 * longest);
  // Names that would run into each other are written aslant.
  const needed = Math.max(...x.ticks.map(({ text }) => text.length)) * 7.5 * stops.length;
  x.slanted = !log && needed > width - 62 - right;
  const plot = frame({
    width,
    height: (narrow ? 300 : 360) + (x.slanted ? 40 : 0),
    label,
    x,
    y,
    right,
    left: 62,
    bottom: x.slanted ? 86 : 46,
  });
  if (!series.length) {
    plot.root.append(
      svg("text", { class: "empty", x: width / 2, y: 150, "text-anchor": "middle" }, "Choose a method above."),
    );
    return plot.root;
  }
  if (zeroLine && y.low < 0 && y.high > 0) {
    plot.root.append(svg("line", { class: "zero", x1: plot.left, x2: plot.right, y1: plot.up(0), y2: plot.up(0) }));
  }
  const room = (plot.right - plot.left) / stops.length;
  const apart = range ? Math.min(10, (0.6 * room) / series.length) : 0;
  const points = [];
  const names = [];
  for (const [place, { key, values }] of series.entries()) {
    const across = (index) => plot.across(ats[index]) + apart * (place - (series.length - 1) / 2);
    const style = styleOf(key);
    const group = svg("g", { class: style.colour });
    const known = values.map((number, index) => ({ number, index })).filter(({ number }) => Number.isFinite(number));
    const path = known
      .map(({ number, index }, i) => `${i ? "L" : "M"}${across(index)} ${plot.up(number)}`)
      .join("");
    group.append(svg("path", { class: "line", d: path, "stroke-dasharray": style.dash }));
    for (const { number, index } of known) {
      const node = mark(style.shape, across(index), plot.up(number), 4, { class: "dot" });
      const [low, high] = ends(key, index);
      if (high !== undefined)
        group.append(
          svg("line", { class: "interval", x1: across(index), x2: across(index), y1: plot.up(low), y2: plot.up(high) }),
        );
      group.append(node);
      points.push({
        x: across(index),
        y: plot.up(number),
        title: `${nameOf(key)}, ${stops[index].text}`,
        rows: rows(key, index),
        node,
      });
    }
    const last = known[known.length - 1];
    names.push({ key, colour: style.colour, x: across(last.index), y: plot.up(last.number) });
    plot.root.append(group);
  }
  const places = spread(
    names.map((name) => name.y),
    15,
    plot.top + 4,
    plot.bottom - 4,
  );
  names.forEach((end, index) => {
    plot.root.append(
      svg(
        "g",
        { class: end.colour },
        svg("path", { class: "leader", d: `M${end.x + 7} ${end.y}L${plot.right + 4} ${places[index]}` }),
        svg(
          "text",
          { class: "line-name", x: plot.right + 7, y: places[index], dy: "0.32em" },
          clipped(end.key, Math.floor((right - 16) / 7.4)),
        ),
      ),
    );
  });
  return explorable(plot.root, points, { reach: 60 });
}
