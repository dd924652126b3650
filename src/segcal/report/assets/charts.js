// Scales, axes, and how a chart is explored by mouse, finger and keys.
function chart(draw) {
  const host = html("div", { class: "chart" });
  let width = 0;
  const redraw = () => {
    hideTooltip();
    if (width > 0) host.replaceChildren(draw(width));
  };
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now === width) return;
    width = now;
    // Drawing inside the callback would change sizes while they are being observed.
    requestAnimationFrame(redraw);
  }).observe(host);
  return { host, redraw };
}

function scaleOf(axis, low, high) {
  const value = axis.log ? Math.log10 : (number) => number;
  const [from, to] = [value(axis.low), value(axis.high)];
  return (number) => low + ((value(number) - from) / (to - from || 1)) * (high - low);
}

// The round step that comes nearest to `count` of them.
function niceStep(span, count) {
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((step) => rough <= step * power * 1.45) ?? 10);
}

// An axis around the values, with round ticks; `zero` makes it start (or end) at 0.
function axisFor(values, { label, count = 5, zero = false, pad = 0.06 } = {}) {
  const known = values.map(numeric).filter(Number.isFinite);
  let low = Math.min(...known),
    high = Math.max(...known);
  if (!known.length) [low, high] = [0, 1];
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const room = pad * (high - low);
  [low, high] = [zero && low === 0 ? 0 : low - room, zero && high === 0 ? 0 : high + room];
  return { low, high, label, ticks: ticksOf(low, high, count) };
}

function ticksOf(low, high, count) {
  const step = niceStep(high - low, count);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step)
    found.push({ at, text: fixed(at, decimals) });
  return found;
}

// The empty plot: axes, ticks, light horizontal lines. Returns it with its two scales.
function frame({ width, height, label, x, y, left = 54, right = 22, top = 14, bottom = 46 }) {
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": label });
  const across = scaleOf(x, left, width - right);
  const up = scaleOf(y, height - bottom, top);
  for (const { at, text } of y.ticks) {
    root.append(
      svg("line", { class: "grid", x1: left, x2: width - right, y1: up(at), y2: up(at) }),
      svg("text", { class: "tick", x: left - 8, y: up(at), dy: "0.32em", "text-anchor": "end" }, text),
    );
  }
  for (const { at, text } of x.ticks) {
    const place = `translate(${across(at)} ${height - bottom + 18})`;
    root.append(
      svg(
        "text",
        {
          class: "tick",
          transform: x.slanted ? `${place} rotate(-35)` : place,
          "text-anchor": x.slanted ? "end" : "middle",
        },
        text,
      ),
    );
  }
  root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  if (x.label) {
    root.append(
      svg(
        "text",
        { class: "axis-name", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" },
        x.label,
      ),
    );
  }
  if (y.label) {
    const middle = (top + height - bottom) / 2;
    root.append(
      svg(
        "text",
        { class: "axis-name", x: 0, y: 0, "text-anchor": "middle", transform: `translate(12 ${middle}) rotate(-90)` },
        y.label,
      ),
    );
  }
  return { root, across, up, left, right: width - right, top, bottom: height - bottom };
}

function mark(shape, x, y, size, attributes) {
  if (shape === 1)
    return svg("rect", { x: x - size * 0.9, y: y - size * 0.9, width: size * 1.8, height: size * 1.8, ...attributes });
  if (shape === 2)
    return svg("path", {
      d: `M${x} ${y - size * 1.2}L${x + size * 1.15} ${y + size * 0.85}H${x - size * 1.15}Z`,
      ...attributes,
    });
  if (shape === 3)
    return svg("path", {
      d: `M${x} ${y - size * 1.3}L${x + size * 1.3} ${y}L${x} ${y + size * 1.3}L${x - size * 1.3} ${y}Z`,
      ...attributes,
    });
  return svg("circle", { cx: x, cy: y, r: size, ...attributes });
}

function showTooltip(title, rows, at) {
  const box = document.getElementById("tooltip");
  box.replaceChildren(
    html("strong", {}, title),
    html(
      "dl",
      {},
      rows.map(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]),
    ),
  );
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const above = at.y - height - 14;
  box.style.left = `${Math.max(8, Math.min(room - width - 8, at.x - width / 2))}px`;
  box.style.top = `${above < 60 ? at.y + 18 : above}px`;
}

function hideTooltip() {
  document.getElementById("tooltip").hidden = true;
}

// Lets people walk through the points of a chart: hover or tap for the nearest, arrow keys for the next, Enter to open.
// A point is {x, y, title, rows, node, open}; with `columns`, only the distance along x counts.
function explorable(root, points, { columns = false, reach = Infinity } = {}) {
  let current = -1;
  const place = (point) => {
    const box = root.getBoundingClientRect();
    const ratio = box.width / root.viewBox.baseVal.width || 1;
    return { x: box.left + point.x * ratio, y: box.top + point.y * ratio };
  };
  const leave = () => {
    points[current]?.node?.classList.remove("active");
    current = -1;
    hideTooltip();
  };
  const choose = (index, aloud) => {
    if (index === current) return;
    leave();
    if (index < 0) return;
    current = index;
    const point = points[index];
    point.node?.classList.add("active");
    showTooltip(point.title, point.rows, place(point));
    if (aloud) speak([point.title, ...point.rows.map((row) => row.join(" "))].join(", "));
  };
  const nearest = (event) => {
    let best = -1,
      least = reach;
    points.forEach((point, index) => {
      const spot = place(point);
      const distance = columns
        ? Math.abs(spot.x - event.clientX)
        : Math.hypot(spot.x - event.clientX, spot.y - event.clientY);
      if (distance < least) [best, least] = [index, distance];
    });
    return best;
  };
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const keys = (event) => {
    if (event.key in steps && points.length) {
      const next = current < 0 && steps[event.key] < 0 ? points.length - 1 : current + steps[event.key];
      choose((next + points.length) % points.length, true);
      event.preventDefault();
    } else if (event.key === "Escape") leave();
    else if (event.key === "Enter") points[current]?.open?.();
  };
  root.setAttribute("tabindex", "0");
  root.addEventListener("pointermove", (event) => choose(nearest(event), false));
  root.addEventListener("pointerdown", (event) => choose(nearest(event), false));
  root.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
  root.addEventListener("click", () => points[current]?.open?.());
  root.addEventListener("keydown", keys);
  root.addEventListener("focus", () => root.matches(":focus-visible") && points.length && choose(0, true));
  root.addEventListener("blur", leave);
  return root;
}

// Moves labels apart so that neighbours are at least `gap` away, keeping their order and the limits.
function spread(positions, gap, low, high) {
  const order = positions.map((_, index) => index).sort((a, b) => positions[a] - positions[b]);
  const placed = [...positions];
  order.forEach((index, i) => {
    placed[index] = Math.max(placed[index], i ? placed[order[i - 1]] + gap : low);
  });
  let limit = high;
  for (const index of [...order].reverse()) {
    placed[index] = Math.min(placed[index], limit);
    limit = placed[index] - gap;
  }
  return placed;
}
