// Charts as plain SVG: bars of requests, and a line over time. Everything is redrawn each time; there is not much.

const SVG = "http://www.w3.org/2000/svg", GAP = 12; // seconds

export function svg(kind, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

// The next 1, 2 or 5 times a power of ten.
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size < 0.0005) return "0";
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : value.toPrecision(2);
}

function frame(holder, low = false) {
  const width = Math.max(200, holder.clientWidth), height = holder.clientHeight || (low ? 130 : 240);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  return { root, width, height };
}

function scale(root, most, x0, x1, y0, y1, count) {
  const step = nice(most / count), top = Math.max(step, Math.ceil(most / step - 0.001) * step);
  for (let value = 0; value <= top * 1.001; value += step) {
    const y = y0 - (value / top) * (y0 - y1);
    root.append(svg("line", { class: "grid", x1: x0, x2: x1, y1: y, y2: y }));
    root.append(svg("text", { x: x0 - 6, y: y + 4, "text-anchor": "end" }, short(value)));
  }
  return (value) => y0 - (Math.min(value, top) / top) * (y0 - y1);
}

// A high value of the times, so that one slow request leaves the others visible.
function ceiling(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const high = sorted[Math.floor(0.95 * (sorted.length - 1))] || 0, most = sorted[sorted.length - 1] || 0;
  return most > 3 * high ? 1.5 * high : most;
}

// `requests`: the ones to draw, each with `sums`: group -> ms. Returns where each bar is, for the pointer.
export function bars(holder, requests, groups, picked) {
  const { root, width, height } = frame(holder), x0 = 44, x1 = width - 4, y0 = height - 8, y1 = 22;
  const slots = Math.max(30, requests.length), step = (x1 - x0) / slots, wide = Math.max(1, step - (step > 4 ? 1 : 0));
  const y = scale(root, ceiling(requests.map((one) => one.ms)), x0, x1, y0, y1, 4);
  root.append(svg("text", { x: 4, y: 12 }, "ms"));
  const paths = Object.fromEntries(groups.map((group) => [group, ""]));
  const places = [];
  const marks = [];
  requests.forEach((one, index) => {
    const x = x1 - (requests.length - index) * step;
    places.push({ x, number: one.number });
    let sum = 0;
    for (const group of groups) {
      const low = y(sum), high = y((sum += Math.max(0, one.sums[group] || 0)));
      if (low - high > 0.05) paths[group] += `M${x.toFixed(1)} ${low.toFixed(1)}h${wide.toFixed(1)}V${high.toFixed(1)}h${(-wide).toFixed(1)}z`;
    }
    if (one.number === picked) root.append(svg("rect", { class: "picked", x: x - 1, y: y1, width: wide + 2, height: y0 - y1 }));
    if (index && one.cut !== requests[index - 1].cut) marks.push({ x, name: one.cut });
  });
  for (const group of groups) root.append(svg("path", { class: `fill-${group}`, "data-group": group, d: paths[group] || "M0 0" }));
  let free = -1;
  for (const { x, name } of marks) {
    root.append(svg("line", { class: "mark", x1: x, x2: x, y1, y2: y0 }));
    if (x < free) continue;
    const end = x > width - 130;
    root.append(svg("text", { class: "name", x: end ? x - 3 : x + 3, y: 16, "text-anchor": end ? "end" : "start" }, tail(name, 22)));
    free = x + 7 * Math.min(22, name.length) + 8;
  }
  holder.replaceChildren(root);
  return { places, step };
}

export function tail(name, most) {
  return name.length <= most ? name : `…${name.slice(1 - most)}`;
}

// `points`: {at, value}, in seconds; `marks`: seconds at which the cut moved. The last `span` seconds before `now`.
export function line(holder, points, now, span, marks = [], spark = false) {
  const { root, width, height } = frame(holder, true), x0 = spark ? 0 : 44, x1 = width - 4, y0 = height - (spark ? 2 : 18), y1 = spark ? 2 : 8;
  const known = points.filter((one) => Number.isFinite(one.value) && one.at > now - span);
  const x = (at) => x1 - ((now - at) / span) * (x1 - x0);
  const most = Math.max(...known.map((one) => one.value), 0);
  const y = spark ? (value) => y0 - (most ? value / most : 0) * (y0 - y1) : scale(root, most || 1, x0, x1, y0, y1, 3);
  if (!spark) {
    root.append(svg("text", { x: x0, y: height - 3 }, `${Math.round(span / 60)} min ago`));
    root.append(svg("text", { x: x1, y: height - 3, "text-anchor": "end" }, "now"));
    for (const at of marks.filter((one) => one > now - span)) root.append(svg("line", { class: "mark", x1: x(at), x2: x(at), y1, y2: y0 }));
  }
  if (known.length) {
    const pieces = []; // where nothing was heard, there is no line
    for (const one of known) {
      const piece = pieces[pieces.length - 1];
      if (piece && one.at - piece[piece.length - 1].at < GAP) piece.push(one);
      else pieces.push([one]);
    }
    for (const piece of pieces) {
      const first = piece[0], last = piece[piece.length - 1], right = Math.min(x1, x(last.at + 2));
      const path = piece.map((one, index) => `${index ? "L" : "M"}${x(one.at).toFixed(1)} ${y(one.value).toFixed(1)}`).join("") + `H${right.toFixed(1)}`;
      root.append(svg("path", { class: "area", d: `${path}V${y0}H${x(first.at).toFixed(1)}z` }), svg("path", { class: "line", d: path }));
    }
  }
  holder.replaceChildren(root);
}
