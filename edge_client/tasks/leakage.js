const COLOURS = ["edge", "tail", "upload", "download", "queue", "transit", "encode", "finish"];
const series = data.series.map((one, index) => ({ ...one, colour: COLOURS[index % COLOURS.length] }));
figure("#figure-depth", {
  name: "depth", title: `Leakage by depth: ${data.model}`, none: series.length ? null : "Nothing was measured.",
  legend: series.map((one) => [one.colour, one.name]),
  paint: (width) => lines(series, [], width, { format: (value) => even(`${value} %`), axis: "cut after layer number (-1: the input)", zero: true }),
  numbers: () => ({ headers: ["codec", "layer", "leakage_percent"], rows: series.flatMap((one) => one.points.map(([x, y]) => [one.name, x, y])) }),
});
document.documentElement.dataset.drawn = "yes";
