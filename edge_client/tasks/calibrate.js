const COLOURS = ["edge", "tail", "upload", "download", "queue", "transit", "encode", "finish"];
const LEAST = 1e-4; // of the loss' scale, which is logarithmic above and has nothing below
const share = (value) => even(`${Number((100 * value).toPrecision(3))} %`);
const rate = (cuts, width) => {
  const height = Math.min(480, Math.max(320, width * 0.5)), left = 70, right = 18, top = 26, bottom = 48;
  const image = svg(width, height), points = cuts.flatMap((cut) => cut.points);
  const sizes = points.map((one) => Math.log10(Math.max(1, one.bytes)));
  const first = Math.min(...sizes) - 0.05, last = Math.max(Math.max(...sizes) + 0.05, first + 0.3);
  const most = Math.max(1e-2, data.max_loss * 2, ...points.map((one) => Math.max(one.loss, Math.min(one.high ?? one.loss, 1))));
  const bend = (value) => Math.log10(1 + Math.max(0, value) / LEAST) / Math.log10(1 + most / LEAST);
  const px = (bytesUp) => left + ((Math.log10(Math.max(1, bytesUp)) - first) / (last - first)) * (width - left - right);
  const py = (value) => top + (height - top - bottom) * (1 - Math.min(1, bend(value)));
  let lowest = Infinity;
  for (const value of [0, 1e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1]) {
    if (value > most * 1.001 || lowest - py(value) < 14) continue;
    lowest = py(value);
    draw("line", image, { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) });
    draw("text", image, { x: left - 8, y: py(value) + 4, class: "end" }, share(value));
  }
  let taken = -Infinity;
  for (let value = 16; value < 2 ** 40; value *= 2) {
    const at = px(value);
    if (Math.log10(value) < first || Math.log10(value) > last) continue;
    draw("line", image, { class: "grid", x1: at, x2: at, y1: top, y2: height - bottom });
    if (at - taken < 58) continue;
    taken = at;
    draw("text", image, { x: at, y: height - bottom + 18, class: at > width - 30 ? "end" : "mid" }, even(bytes(value)));
  }
  draw("line", image, { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
  draw("line", image, { class: "reference", x1: left, x2: width - right, y1: py(data.max_loss), y2: py(data.max_loss) });
  draw("text", image, { x: (left + width - right) / 2, y: height - 8, class: "mid" }, "bytes up, a request");
  draw("text", image, { x: 2, y: 14 }, "loss");
  for (const cut of cuts) {
    draw("polyline", image, { class: "line", style: `stroke:${color(cut.colour)};stroke-opacity:.45`, points: cut.points.map((one) => `${px(one.bytes)},${py(one.loss)}`).join(" ") });
    for (const one of cut.points) {
      const group = draw("g", image, { class: "point" }), x = px(one.bytes);
      group.dataset.key = `${cut.name} ${one.codec}`;
      if (one.n) draw("line", group, { class: "span", style: `stroke:${color(cut.colour)};stroke-opacity:.6`, x1: x, x2: x, y1: py(one.low), y2: py(one.high ?? most) });
      draw("circle", group, { class: "hit", cx: x, cy: py(one.loss), r: 11 });
      draw("circle", group, { cx: x, cy: py(one.loss), r: 5, style: one.within ? `fill:${color(cut.colour)}` : `fill:var(--paper);stroke:${color(cut.colour)};stroke-width:2` });
      const bounds = one.n ? [["between", `${share(one.low)} and ${one.high === null ? "?" : share(one.high)}`], ["inputs", `${one.n}`]] : [];
      tell(group, `${cut.name}: ${one.codec}`, [["bytes up", bytes(one.bytes)], ["loss", share(one.loss)], ...bounds]);
    }
  }
  return [image];
};
const drawn = data.cuts.map((cut, index) => ({ ...cut, colour: COLOURS[index % COLOURS.length] }));
figure("#figure-rate", {
  name: "rate", title: `Rate against loss: ${data.model}`, none: drawn.length ? null : "Nothing was measured.",
  legend: drawn.map((one) => [one.colour, one.name]),
  paint: (width) => rate(drawn, width),
  numbers: () => ({
    headers: ["cut after", "codec", "bytes up", "loss", "low", "high", "inputs"],
    rows: drawn.flatMap((cut) => cut.points.map((one) => [cut.name, one.codec, one.bytes, one.loss, one.low, one.high, one.n])),
  }),
});
document.documentElement.dataset.drawn = "yes";
