const COLOURS = ["edge", "tail", "upload", "download", "queue", "transit", "encode", "finish"];
const CUT = "cut after block";
for (const { key, title, series, unit } of data.charts) {
  const drawn = series.map((one, index) => ({ ...one, colour: one.name === "edge-only" ? "prepare" : COLOURS[index % COLOURS.length], dashed: one.name === "edge-only" }));
  const format = (value) => even(`${Number(value.toPrecision(4))} ${unit}`);
  figure(`#figure-${key}`, {
    name: key, title: `${title}: ${data.model}`, none: drawn.length ? null : "Nothing to draw.",
    legend: drawn.map((one) => [one.colour, one.name]),
    paint: (width) => lines(drawn, [], width, { format, axis: CUT, zero: true, dotsColour: "prepare" }),
    numbers: () => ({ headers: ["series", CUT, unit], rows: drawn.flatMap((one) => one.points.map(([x, y]) => [one.name, x, y])) }),
  });
}
document.documentElement.dataset.drawn = "yes";
