const percent = (share) => even(`${Number((100 * share).toPrecision(5))} %`);
const decades = (low, high) => { // ticks of a logarithmic axis: 1, 2 and 5 of each decade, or 1 alone of many
  const found = [], steps = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of steps) if (step * 10 ** power >= low * 0.999 && step * 10 ** power <= high * 1.001) found.push(step * 10 ** power);
  }
  return found;
};
const scale = (values, log, from, to, zero) => {
  const known = values.filter((value) => value !== null && Number.isFinite(value) && (!log || value > 0));
  let low = zero ? 0 : Math.min(...known), high = Math.max(...known);
  if (log) [low, high] = [low / 1.1, high * 1.1];
  if (!(high > low)) high = low + 1;
  const at = log
    ? (value) => from + ((Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from)
    : (value) => from + ((value - low) / (high - low)) * (to - from);
  return { at, ticks: log ? decades(low, high) : ticks(high, 5).filter((one) => one >= low) };
};
/* `series`: [{name, colour, dashed, step, points: [{x, y, low, high, lines}]}]; `limit`: [axis, value] of a dashed line */
const plot = (series, width, { xLog, yLog, xFormat, yFormat, xAxis, yAxis, xs, limit }) => {
  const height = Math.min(440, Math.max(300, width * 0.44)), left = 70, right = 22, top = 26, bottom = 48;
  const image = svg(width, height), every = series.flatMap((one) => one.points);
  const limits = (axis) => (limit && limit[0] === axis ? [limit[1]] : []);
  const x = scale([...every.map((one) => one.x), ...limits("x")], xLog, left, width - right, !xLog);
  const y = scale([...every.flatMap((one) => [one.y, one.low ?? one.y, one.high ?? one.y]), ...limits("y")], yLog, height - bottom, top, !yLog);
  let above = Infinity;
  for (const value of y.ticks) {
    draw("line", image, { class: "grid", x1: left, x2: width - right, y1: y.at(value), y2: y.at(value) });
    if (above - y.at(value) < 14) continue;
    above = y.at(value);
    draw("text", image, { x: left - 8, y: above + 4, class: "end" }, even(yFormat(value)));
  }
  let taken = -Infinity;
  for (const value of xs || x.ticks) {
    draw("line", image, { class: "grid", x1: x.at(value), x2: x.at(value), y1: top, y2: height - bottom });
    if (x.at(value) - taken < 56) continue;
    taken = x.at(value);
    draw("text", image, { x: taken, y: height - bottom + 18, class: taken > width - 40 ? "end" : "mid" }, even(xFormat(value)));
  }
  draw("line", image, { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
  draw("text", image, { x: (left + width - right) / 2, y: height - 8, class: "mid" }, xAxis);
  draw("text", image, { x: 2, y: 14 }, yAxis);
  if (limit) {
    const [axis, value] = limit;
    const ends = axis === "x" ? { x1: x.at(value), x2: x.at(value), y1: top, y2: height - bottom } : { x1: left, x2: width - right, y1: y.at(value), y2: y.at(value) };
    draw("line", image, { class: "reference", ...ends });
  }
  for (const one of series) {
    draw("polyline", image, { class: one.dashed ? "line dashed" : "line", style: `stroke:${color(one.colour)}`, points: one.points.map((at) => `${x.at(at.x)},${y.at(at.y)}`).join(" ") });
    const dots = one.dense ? one.points.filter((at) => at.lines) : one.points;
    for (const at of dots) {
      if (!at.lines) continue;
      const group = draw("g", image, { class: "point" }), px = x.at(at.x), py = y.at(at.y);
      group.dataset.key = `${one.name} ${at.x}`;
      if (at.low && at.high) draw("line", group, { class: "span", style: `stroke:${color(one.colour)};stroke-opacity:.6`, x1: px, x2: px, y1: y.at(at.low), y2: y.at(at.high) });
      draw("circle", group, { class: "hit", cx: px, cy: py, r: 11 });
      draw("circle", group, { class: "dot", cx: px, cy: py, r: 5, style: `fill:${color(one.colour)}` });
      tell(group, one.name, at.lines);
    }
  }
  return [image];
};
const COLOURS = ["edge", "tail", "upload", "download", "queue", "transit", "encode", "finish"];
const rate = (value) => `${Number(value.toPrecision(4))}`;
const rates = data.steps.map((one) => one.rate);
const none = data.steps.some((one) => one.answered) ? null : "Nothing was answered.";

const quantiles = [["p50", "edge"], ["p90", "tail"], ["p99", "upload"]].map(([name, colour]) => ({
  name, colour,
  points: data.steps.filter((one) => one[name].value !== null).map((one) => ({
    x: one.rate, y: one[name].value, low: one[name].low, high: one[name].high,
    lines: [["rate", `${rate(one.rate)}/s`], [name, time(one[name].value)],
      ["between", one[name].low === null || one[name].high === null ? "too few to say" : `${time(one[name].low)} and ${time(one[name].high)}`],
      ["requests beyond", `${one[name].beyond}`]],
  })),
}));
figure("#figure-latency", {
  name: "latency", title: `Latency against rate: ${data.model}`, none, legend: quantiles.map((one) => [one.colour, one.name]),
  paint: (width) => plot(quantiles, width, { yLog: true, xFormat: rate, yFormat: time, xAxis: "requests a second", yAxis: "latency", xs: rates, limit: ["y", data.deadline_ns] }),
  numbers: () => ({
    headers: ["rate", "quantile", "ns", "low", "high", "beyond"],
    rows: data.steps.flatMap((one) => ["p50", "p90", "p99"].map((name) => [rate(one.rate), name, one[name].value, one[name].low, one[name].high, one[name].beyond])),
  }),
});
const through = [
  { name: "offered", colour: "finish", dashed: true, points: data.steps.map((one) => ({ x: one.rate, y: one.offered })) },
  { name: "throughput", colour: "tail", points: data.steps.map((one) => ({ x: one.rate, y: one.throughput, lines: [["rate", `${rate(one.rate)}/s`], ["answers", `${rate(one.throughput)}/s`]] })) },
  { name: "goodput", colour: "edge", points: data.steps.map((one) => ({ x: one.rate, y: one.goodput.value, low: one.goodput.low, high: one.goodput.high, lines: [["rate", `${rate(one.rate)}/s`], ["in time", `${rate(one.goodput.value)}/s`]] })) },
];
figure("#figure-goodput", {
  name: "goodput", title: `Goodput: ${data.model}`, none, legend: through.map((one) => [one.colour, one.name]),
  paint: (width) => plot(through, width, { xFormat: rate, yFormat: rate, xAxis: "requests a second, offered", yAxis: "answers a second", xs: rates }),
  numbers: () => ({
    headers: ["rate", "offered", "throughput", "goodput", "low", "high"],
    rows: data.steps.map((one) => [rate(one.rate), one.offered, one.throughput, one.goodput.value, one.goodput.low, one.goodput.high]),
  }),
});
const curves = data.steps.filter((one) => one.cdf.length).map((one, index) => ({
  name: `${rate(one.rate)}/s`, colour: COLOURS[index % COLOURS.length], dense: true,
  points: one.cdf.map(([ns, share], at) => ({ x: ns, y: share, lines: at % 8 === 0 || at === one.cdf.length - 1 ? [["answered", percent(share)], ["within", time(ns)]] : null })),
}));
figure("#figure-cdf", {
  name: "distribution", title: `Distribution of the latency: ${data.model}`, none, legend: curves.map((one) => [one.colour, one.name]), table: false,
  paint: (width) => plot(curves, width, { xLog: true, xFormat: time, yFormat: percent, xAxis: "latency", yAxis: "requests answered within", limit: ["x", data.deadline_ns] }),
  numbers: () => ({ headers: ["rate", "ns", "share"], rows: data.steps.flatMap((one) => one.cdf.map(([ns, share]) => [rate(one.rate), ns, share])) }),
});
document.documentElement.dataset.drawn = "yes";
