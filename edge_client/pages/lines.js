// -- lines over a number: a series each, with dots that tell --------------------------------------------------------------
/* `series`: [{name, colour, dashed, points: [[x, y]]}]; `dots`: [[x, y]] without a line */
const lines = (series, dots, width, { format, axis, zero, dotsColour }) => {
  const every = [...series.flatMap((one) => one.points), ...dots];
  const height = Math.min(420, Math.max(280, width * 0.42)), left = 70, right = 18, top = 14, bottom = 48;
  const image = svg(width, height);
  const xs = [...new Set(every.map(([x]) => x))].sort((a, b) => a - b), ys = every.map(([, y]) => y);
  const [first, last] = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] - 1, xs[0] + 1];
  const bottomValue = zero ? 0 : Math.min(...ys);
  const spread = Math.max(Math.max(...ys) - bottomValue, Math.abs(Math.max(...ys)) * 1e-6, 1e-9);
  const power = 10 ** Math.floor(Math.log10(spread / 4));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= (spread / 4) * 0.999);
  const low = Math.floor(bottomValue / step + 1e-9), high = Math.max(low + 1, Math.ceil(Math.max(...ys) / step - 1e-9));
  const px = (x) => left + ((x - first) / (last - first)) * (width - left - right);
  const py = (y) => top + ((high * step - y) / ((high - low) * step)) * (height - top - bottom);
  for (let at = low; at <= high; at += 1) {
    draw("line", image, { class: "grid", x1: left, x2: width - right, y1: py(at * step), y2: py(at * step) });
    draw("text", image, { x: left - 8, y: py(at * step) + 4, class: "end" }, format(Number((at * step).toPrecision(8))));
  }
  let taken = -Infinity;
  for (const x of xs) {
    if (px(x) - taken < 26) continue;
    taken = px(x);
    draw("text", image, { x: px(x), y: height - bottom + 18, class: "mid" }, `${x}`);
  }
  draw("text", image, { x: (left + width - right) / 2, y: height - 8, class: "mid" }, axis);
  draw("line", image, { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
  for (const [x, y] of dots) draw("circle", image, { class: "dot", cx: px(x), cy: py(y), r: 3, style: `fill:${color(dotsColour)}` });
  for (const one of series) {
    draw("polyline", image, { class: one.dashed ? "line dashed" : "line", style: `stroke:${color(one.colour)}`, points: one.points.map(([x, y]) => `${px(x)},${py(y)}`).join(" ") });
    for (const [x, y] of one.points) {
      const group = draw("g", image, { class: "point" });
      group.dataset.key = `${one.name} ${x}`;
      draw("circle", group, { class: "hit", cx: px(x), cy: py(y), r: 11 });
      draw("circle", group, { class: "dot", cx: px(x), cy: py(y), r: 5, style: `fill:${color(one.colour)}` });
      tell(group, one.name, [[axis, `${x}`], ["value", format(Number(y.toPrecision(6)))]]);
    }
  }
  return [image];
};
