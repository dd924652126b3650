// Every class, or channel of multi-label data, before and after: how well it is calibrated and segmented.
const MANY_CLASSES = 30;

function classesSection() {
  const rows = tableOf(study.classes, "method", "class");
  const names = [...new Set(study.classes.map((row) => row.class))];
  if (!names.length) return null;
  const [what, several] = channels.length ? ["channel", "channels"] : ["class", "classes"];
  let method = after;
  let order = "declared";
  let all = names.length <= MANY_CLASSES;
  const host = html("div", {});
  const more = html("button", { type: "button", class: "quiet", on: { click: () => ((all = true), refresh()) } }, `Show all ${names.length} ${several}`);
  const refresh = () => {
    const worst = (name) => -(numeric(lookUp(rows, BASELINE, name)?.ece) || 0);
    const sorted = order === "declared" ? names : [...names].sort((one, other) => worst(one) - worst(other));
    host.replaceChildren(classTable(rows, all ? sorted : sorted.slice(0, MANY_CLASSES), method, what));
    more.hidden = all;
  };
  refresh();
  const known = methodOptions.filter(([key]) => key !== BASELINE && study.classes.some((row) => row.method === key));
  return section(
    "classes",
    channels.length ? "Inside each channel" : "Class by class",
    `All test ${voxels} together${study.splits.length > 1 ? ", means over the repeats" : ""}. ECE is that of the ${channels.length ? "channel's inside" : "class"} against the rest, 15 bins, as a share of all ${voxels}: that of a rare ${what} is small. NLL − entropy is over the ${voxels} predicted ${channels.length ? "inside it" : "as the class"}: above 0 the network is overconfident there, below 0 underconfident.`,
    controls(
      known.length
        ? chooser("After", known, method, (key) => {
            method = key;
            refresh();
          })
        : null,
      names.length > 2
        ? segments("Order", [["declared", "As declared"], ["ece", "Largest ECE first"]], order, (chosen) => {
            order = chosen;
            refresh();
          })
        : null,
    ),
    host,
    more,
  );
}

function classTable(rows, names, method, what) {
  const measures = [
    ["ECE", (row) => row.ece, fixed],
    ["Dice", (row) => row.dice, fixed],
    ["NLL − entropy", (row) => row.balance, signed],
  ].map(([title, value, shown]) => {
    const values = study.classes.map(value);
    return { title, value, shown, decimals: Math.max(3, decimalsFor(values)) };
  });
  const both = method === BASELINE ? [["before", BASELINE]] : [["before", BASELINE], ["after", method]];
  const fine = (title, text) => html("th", { scope: "col" }, title, html("span", { class: "fine" }, text));
  const cells = (name) => [
    ...measures.flatMap(({ value, shown, decimals }) =>
      both.map(([, key]) => {
        const row = lookUp(rows, key, name);
        return shown(row && value(row), decimals);
      }),
    ),
    whole(lookUp(rows, BASELINE, name)?.voxels),
    whole(lookUp(rows, method, name)?.predicted),
  ];
  return gridTable({
    label: `Calibration and segmentation of every ${what}`,
    kind: "matrix",
    heads: [
      capital(what),
      ...measures.flatMap(({ title }) => both.map(([when]) => fine(title, when))),
      fine(capital(voxels), "labelled"),
      fine(capital(voxels), method === BASELINE ? "predicted" : "predicted after"),
    ],
    rows: names.map((name) => [name, cells(name)]),
  });
}
