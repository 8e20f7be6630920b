const COLOURS = ["edge", "tail", "upload", "download", "queue", "transit", "encode", "finish"];
const KEPT = "channels kept";
const coloured = (series) => series.map((one, index) => ({ ...one, colour: one.name === "random" ? "prepare" : COLOURS[index % COLOURS.length], dashed: one.name === "random" }));
for (const { key, title, series, dots, unit, zero } of data.charts) {
  const drawn = coloured(series);
  const format = unit === "KiB" ? (value) => even(`${Number(value.toPrecision(4))} KiB`) : (value) => `${Number(value.toPrecision(4))} ${unit}`;
  figure(`#figure-${key}`, {
    name: key, title: `${title}: ${data.model}`, none: drawn.length ? null : "Nothing to draw.",
    legend: drawn.map((one) => [one.colour, one.name]),
    paint: (width) => lines(drawn, dots, width, { format, axis: KEPT, zero, dotsColour: "prepare" }),
    numbers: () => ({
      headers: ["series", KEPT, `${key} (${unit})`],
      rows: [...drawn.flatMap((one) => one.points.map(([x, y]) => [one.name, x, y])), ...dots.map(([x, y]) => ["random, each", x, y])],
    }),
  });
}
document.documentElement.dataset.drawn = "yes";
