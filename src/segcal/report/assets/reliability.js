// Reliability diagrams: accuracy by confidence.
const FEW = 100;

function reliabilitySection() {
  if (!study.reliability.length) return null;
  const places = [...new Set(study.reliability.map((row) => row.region))];
  const state = { region: places.includes(mainRegion) ? mainRegion : places[0], class: channels.length ? 0 : null };
  const panels = [panel("Before", BASELINE, state), panel("After", after, state)];
  const classChooser = chooser(
    channels.length ? "Channel" : "Predicted class",
    [
      ...(channels.length ? [] : [["", "All classes"]]),
      ...(channels.length ? channels : data.class_names).map((name, index) => [String(index), name]),
    ],
    state.class === null ? "" : String(state.class),
    (value) => {
      state.class = value === "" ? null : Number(value);
      refresh();
    },
  );
  const classList = classChooser.querySelector("select");
  const refresh = () => {
    // Not every region is measured class by class.
    const known = (label) => study.reliability.some((row) => row.region === state.region && row.class === label);
    if (!known(state.class)) state.class = channels.length ? 0 : null;
    for (const option of classList.options) option.disabled = option.value !== "" && !known(Number(option.value));
    classList.value = state.class === null ? "" : String(state.class);
    panels.forEach((each) => each.refresh());
  };
  refresh();
  return section(
    "reliability",
    "Does confidence match reality?",
    `Each dot is a group of ${voxels} with similar confidence. On the diagonal, confidence equals accuracy. Below the diagonal the network is overconfident, above it underconfident. The bars below count the ${voxels} on a logarithmic scale.`,
    controls(
      chooser(
        "Region",
        places.map((region) => [region, regionName(region)]),
        state.region,
        (region) => {
          state.region = region;
          refresh();
        },
      ),
      classChooser,
    ),
    html(
      "div",
      { class: "two" },
      panels.map((each) => each.host),
    ),
  );
}

function panel(when, first, state) {
  let method = first;
  const bins = () => lookUp(reliabilities, method, state.region, state.class);
  const facts = html("p", { class: "fine facts-row" });
  const drawn = chart((width) => drawReliability(width, bins(), `${when}: ${nameOf(method)}`));
  const refresh = () => {
    const { count, sure, right, ece } = totals(bins());
    facts.textContent = count
      ? `Pooled ECE ${fixed(ece, 4)} (${plural(bins().count.length, "bin")}) · confidence ${share(sure, 1)} · accuracy ${share(right, 1)} · ${shortCount(count)} ${voxels}`
      : `No ${voxels} here.`;
    drawn.redraw();
  };
  const host = html(
    "figure",
    { class: "panel", "data-panel": when.toLowerCase() },
    html(
      "figcaption",
      {},
      chooser(when, methodOptions, method, (key) => {
        method = key;
        refresh();
      }),
      facts,
    ),
    drawn.host,
  );
  return { host, refresh };
}

function drawReliability(width, bins, label) {
  const beneath = 78;
  const height = Math.min(width, 460) * 0.86 + beneath;
  const ends = { low: 0, high: 1 };
  const hundredths = [0, 0.2, 0.4, 0.6, 0.8, 1].map((at) => ({ at, text: `${Math.round(100 * at)}%` }));
  const plot = frame({
    width,
    height,
    label: `Reliability diagram. ${label}. Use the arrow keys to go through the bins.`,
    bottom: beneath + 46,
    x: { ...ends, ticks: [] },
    y: { ...ends, ticks: hundredths, label: "Accuracy" },
  });
  const { root, across, up } = plot;
  const [top, base] = [plot.bottom + 14, height - 46];
  root.append(
    svg("line", { class: "diagonal", x1: across(0), y1: up(0), x2: across(1), y2: up(1) }),
    svg("text", { class: "corner under", x: across(0.03), y: up(0.94) }, "underconfident"),
    svg("text", { class: "corner over", x: across(0.97), y: up(0.04), "text-anchor": "end" }, "overconfident"),
    svg("line", { class: "axis", x1: plot.left, x2: plot.right, y1: base, y2: base }),
    ...hundredths.map(({ at, text }) =>
      svg("text", { class: "tick", x: across(at), y: base + 18, "text-anchor": "middle" }, text),
    ),
    svg(
      "text",
      { class: "axis-name", x: (plot.left + plot.right) / 2, y: height - 6, "text-anchor": "middle" },
      "Confidence",
    ),
    svg(
      "text",
      {
        class: "axis-name",
        x: 0,
        y: 0,
        "text-anchor": "middle",
        transform: `translate(12 ${(top + base) / 2}) rotate(-90)`,
      },
      "Count",
    ),
  );
  const total = totals(bins).count;
  if (!total) {
    root.append(
      svg(
        "text",
        { class: "empty", x: (plot.left + plot.right) / 2, y: up(0.5), "text-anchor": "middle" },
        `no ${voxels}`,
      ),
    );
    return root;
  }
  const size = 1 / bins.count.length;
  // Most voxels are in the last bin; a logarithmic scale shows the others as well.
  const tallest = Math.log10(Math.max(...bins.count) + 1);
  const points = [];
  const path = [];
  bins.count.forEach((count, index) => {
    if (!count) return;
    const [confidence, accuracy] = [bins.confidence[index], bins.accuracy[index]];
    const few = count < FEW ? "few" : "";
    const left = across(index * size) + 1,
      wide = across((index + 1) * size) - across(index * size) - 2;
    const tall = (Math.log10(count + 1) / tallest) * (base - top);
    const node = svg(
      "g",
      { class: `bin ${few}` },
      svg("rect", { class: "shade", x: left - 1, width: wide + 2, y: plot.top, height: base - plot.top }),
      svg("rect", {
        class: confidence > accuracy ? "gap over" : "gap under",
        x: left,
        width: wide,
        y: up(Math.max(confidence, accuracy)),
        height: Math.abs(up(confidence) - up(accuracy)),
      }),
      svg("rect", { class: "count", x: left, width: wide, y: base - tall, height: tall }),
      svg("circle", { class: "point", cx: across(confidence), cy: up(accuracy), r: 4 }),
    );
    root.append(node);
    if (!few) path.push(`${path.length ? "L" : "M"}${across(confidence)} ${up(accuracy)}`);
    const gap = 100 * (confidence - accuracy);
    points.push({
      x: left + wide / 2,
      y: up(Math.max(confidence, accuracy)),
      node,
      title: `Confidence ${share(index * size, 1)} to ${share((index + 1) * size, 1)}`,
      rows: [
        [capital(voxels), `${whole(count)} (${share(count, total)})`],
        ["Mean confidence", share(confidence, 1)],
        ["Accuracy", share(accuracy, 1)],
        ["Gap", `${signed(gap, 1)} points${Math.abs(gap) < 0.5 ? "" : gap > 0 ? ", overconfident" : ", underconfident"}`],
      ],
    });
  });
  root.append(svg("path", { class: "curve", d: path.join("") }));
  return explorable(root, points, { columns: true });
}
