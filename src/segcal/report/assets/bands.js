// Calibration by distance to the nearest label boundary.
function bandsSection() {
  const names = [...new Set(study.bands.map((row) => row.band))];
  if (!names.length) return null;
  const rows = tableOf(study.bands, "method", "band");
  const bands = names.map((name) => study.bands.find((row) => row.band === name));
  const measures = {
    gap: ["Confidence − accuracy", (row) => numeric(row.confidence) - numeric(row.accuracy)],
    ece: ["ECE", (row) => numeric(row.ece)],
    nll: ["NLL", (row) => numeric(row.nll)],
  };
  let measure = "ece";
  const drawn = lineChart(() => {
    const [title, value] = measures[measure];
    return {
      label: `${title} by distance to the boundary. Use the arrow keys to go through the points.`,
      stops: bands.map((band) => ({ text: bandName(band), short: bandName(band).replace(/ .*/, "") })),
      xLabel: `Distance to the nearest boundary (${bands[0].unit === "mm" ? "mm" : voxels})`,
      yLabel: title,
      zeroLine: measure === "gap",
      value: (key, index) => {
        const row = lookUp(rows, key, names[index]);
        return row && row.count ? value(row) : NaN;
      },
      rows: (key, index) => {
        const row = lookUp(rows, key, names[index]);
        return [
          ["ECE", fixed(row.ece, 4)],
          ["NLL", fixed(row.nll, 4)],
          ["Confidence", share(row.confidence, 1)],
          ["Accuracy", share(row.accuracy, 1)],
          [capital(voxels), whole(row.count)],
        ];
      },
    };
  });
  return section(
    "boundary",
    "Near boundaries",
    "Most errors occur where structures meet. A calibrator that only works far from boundaries is of little use there.",
    controls(
      segments(
        "Measure",
        Object.entries(measures).map(([id, [title]]) => [id, title]),
        measure,
        (id) => {
          measure = id;
          drawn.redraw();
        },
      ),
    ),
    methodChips(),
    drawn.host,
    html(
      "p",
      { class: "fine" },
      `Distance from the true boundary; ${voxels} per band before: ${bands.map((band) => `${bandName(band)} ${shortCount(band.count)}`).join(", ")}.`,
    ),
  );
}
