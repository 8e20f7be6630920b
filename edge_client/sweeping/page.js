"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SEGMENTS = {
    prepare: "prepare input", edge: "edge", encode: "encode", upload: "upload", transit: "in transit", queue: "queue",
    tail: "tail on the cloud", download: "download", finish: "decode answer",
  };
  const color = (name) => `var(--${name})`;
  const find = (selector) => document.querySelector(selector);

  // -- numbers for people ----------------------------------------------------------------------------------------
  const short = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));
  const even = (text) => text.replace(/(\.\d*?)0+(?= )/, "$1").replace(/\.(?= )/, ""); // of ticks: "2.00 ms" -> "2 ms"
  const scaled = (value, units) => {
    let [factor, unit] = units[0];
    for (const [size, name] of units) if (Math.abs(value) >= size) [factor, unit] = [size, name];
    return value === 0 ? `0 ${unit}` : `${short(value / factor)} ${unit}`;
  };
  const time = (ns) => scaled(ns, [[1e3, "µs"], [1e6, "ms"], [1e9, "s"]]);
  const bytes = (n) => (n < 1024 ? `${Math.round(n)} B` : scaled(n, [[1024, "KiB"], [1024 ** 2, "MiB"], [1024 ** 3, "GiB"]]));
  const joules = (j) => scaled(j, [[1e-6, "µJ"], [1e-3, "mJ"], [1, "J"]]);
  const percent = (value) => `${value > 0 ? "+" : ""}${value.toFixed(1)} %`;

  // -- elements: text is only ever set as text -------------------------------------------------------------------
  const html = (tag, parent, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const draw = (tag, parent, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const legend = (section, entries) => {
    const box = find(`${section} .legend`);
    for (const [name, label] of entries) {
      const one = html("span", box);
      const sign = html("i", one, name === "tick" ? "tick" : "");
      if (name !== "tick") sign.style.background = color(name);
      one.append(label);
    }
  };

  // -- the tooltip -----------------------------------------------------------------------------------------------
  const tip = find("#tip");
  const told = new WeakMap(); // element -> {title, lines: [[label, value]]}
  let lit = null;
  const tell = (element, title, lines) => told.set(element, { title, lines });
  const hide = () => {
    tip.hidden = true;
    if (lit) lit.classList.remove("on");
    lit = null;
  };
  const show = (event) => {
    let element = event.target instanceof Element ? event.target : null;
    while (element && !told.has(element)) element = element.parentElement;
    if (!element) return hide();
    if (element !== lit) {
      hide();
      lit = element;
      lit.classList.add("on");
      const { title, lines } = told.get(element);
      tip.replaceChildren();
      html("b", tip, "", title);
      for (const [label, value] of lines) {
        const line = html("div", tip);
        html("span", line, "", label);
        html("span", line, "", value);
      }
      tip.hidden = false;
    }
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, event.clientX + 14), innerWidth - width - 8);
    const below = event.clientY + 18 + height < innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below ? event.clientY + 18 : Math.max(8, event.clientY - height - 14)}px`;
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.documentElement.addEventListener("pointerleave", hide);

  // -- what a way has to tell ------------------------------------------------------------------------------------
  const whole = (way) => way.latency_ns !== null;
  const networked = data.ways.filter((way) => way.mode === "networked" || way.name === "edge-only").filter(whole);
  const locals = data.ways.filter((way) => way.mode === "local" && way.name !== "edge-only").filter(whole);
  const isCut = (way) => way.layer_id !== null && way.layer_id >= 0;
  const short_name = (way) => ({ "edge-only": "edge", "cloud-only": "cloud", "cloud-only-file": "file" })[way.name];
  const title = (way) => (isCut(way) ? `after layer ${way.layer_id}: ${way.name}` : way.name);
  const summary = (way) => {
    const lines = [["latency", time(way.latency_ns)]];
    if (way.quartiles_ns) lines.push(["quartiles", `${time(way.quartiles_ns[0])} to ${time(way.quartiles_ns[2])}`]);
    if (way.predicted) lines.push(["predicted", time(way.predicted.latency_ns)]);
    for (const [name, label] of Object.entries(SEGMENTS)) {
      if (way.segments_ns[name]) lines.push([label, time(way.segments_ns[name])]);
    }
    lines.push(["up, down", `${bytes(way.bytes_up)}, ${bytes(way.bytes_down)}`]);
    lines.push(["exact", `${way.exact} of ${way.requests - way.failed}`]);
    return lines;
  };

  // -- bars: one row each, in HTML, so that long names and narrow screens are the browser's work ----------------------
  const row = (box, number, label, value, className) => {
    const made = html("div", box, `bar ${className || ""}`);
    const name = html("span", made, "label"); // names differ at their ends: a long one gives way in the middle
    if (number !== null && number >= 0) html("span", name, "number", `${number}`);
    html("span", name, "", label.slice(0, -18));
    html("span", name, "end", label.slice(-18));
    const track = html("div", made, "track");
    html("span", made, "value", value);
    return { made, track };
  };
  const fill = (track, pieces, most) => {
    const box = html("div", track, "fill");
    for (const [name, value] of pieces) {
      if (!(value > 0)) continue;
      const piece = html("i", box, `piece ${name}`);
      piece.style.width = `${Math.min(100, (100 * value) / most)}%`;
      if (value > most * 1.001) piece.classList.add("longer"); // than the scale: it fades out
      piece.style.background = color(name);
    }
  };

  const stages = (order) => {
    const box = find("#stages .bars");
    box.replaceChildren();
    const ways = [...networked];
    if (order === "fastest") ways.sort((a, b) => a.latency_ns - b.latency_ns);
    const most = Math.max(...ways.map((way) => Math.max(way.latency_ns, way.predicted ? way.predicted.latency_ns : 0)));
    for (const way of ways) {
      const best = way.name === data.winner ? "best" : "";
      const { made, track } = row(box, way.layer_id, way.name, time(way.latency_ns), best);
      fill(track, Object.keys(SEGMENTS).map((name) => [name, way.segments_ns[name]]), most);
      if (way.predicted) html("div", track, "mark").style.left = `${(100 * way.predicted.latency_ns) / most}%`;
      tell(made, title(way), summary(way));
    }
    if (!ways.length) html("p", box, "empty", "No request was answered.");
  };
  legend("#stages", [...Object.entries(SEGMENTS), ...(networked.some((way) => way.predicted) ? [["tick", "predicted"]] : [])]);
  stages("layers");
  for (const button of document.querySelectorAll("[data-order]")) {
    button.addEventListener("click", () => {
      for (const one of document.querySelectorAll("[data-order]")) one.setAttribute("aria-pressed", one === button);
      hide();
      stages(button.dataset.order);
    });
  }

  const layers = () => {
    const box = find("#layers .bars");
    // what lies outside layers is often longer than each of them, and would make them all short
    const real = data.layers.filter((one) => one.layer_id !== null);
    const most = Math.max(0, ...real.flatMap((one) => ["edge", "cloud"].map((side) => (one[side] ? one[side].inference_ns : 0))));
    for (const one of data.layers) {
      const said = (side) => (one[side] ? time(one[side].inference_ns) : "–");
      const { made, track } = row(box, one.layer_id, one.layer, `${said("edge")} · ${said("cloud")}`, "pair");
      for (const side of ["edge", "cloud"]) fill(track, [[side, one[side] ? one[side].inference_ns : 0]], most || 1);
      const lines = [["type", one.layer_type], ["edge", said("edge")], ["cloud", said("cloud")]];
      for (const side of ["edge", "cloud"]) {
        if (one[side] && one[side].cpu_ns !== null) lines.push([`CPU time, ${side}`, time(one[side].cpu_ns)]);
        if (one[side] && one[side].energy_j !== null) lines.push([`energy, ${side}`, joules(one[side].energy_j)]);
      }
      if (one.output_bytes !== null) lines.push(["output", bytes(one.output_bytes)]);
      if (one.shape) lines.push([one.dtype, one.shape]);
      tell(made, one.layer_id === null ? one.layer : `layer ${one.layer_id}: ${one.layer}`, lines);
    }
    if (!data.layers.length) html("p", box, "empty", "No layer was measured.");
  };
  legend("#layers", [["edge", "edge"], ["cloud", "cloud"]]);
  layers();

  // -- charts in SVG, drawn anew when their width changes ----------------------------------------------------------
  const chart = (box, paint) => {
    let drawn = 0;
    const again = () => {
      const width = Math.floor(box.clientWidth);
      if (!width || width === drawn) return;
      drawn = width;
      hide();
      box.replaceChildren();
      paint(box, width);
    };
    new ResizeObserver(again).observe(box);
    again();
  };
  const nothing = (box, text) => html("p", box, "empty", text);
  const ticks = (most, count) => {
    const raw = most / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= raw * 0.999);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => index * step);
  };
  const binary = (most, count) => {
    const unit = 1024 ** Math.floor(Math.log(Math.max(1, most)) / Math.log(1024));
    return ticks(most / unit, count).map((one) => one * unit);
  };

  const columns = (box, width, ways, { pieces, format, marks, lines, reference, referenceText }) => {
    const height = 260, left = 64, right = 8, top = reference ? 22 : 12, bottom = 40;
    const wholes = ways.filter((way) => !isCut(way)), cuts = ways.filter(isCut);
    const slot = wholes.length ? 40 : 0;
    const full = Math.max(width, left + right + wholes.length * slot + cuts.length * 3);
    const total = (way) => pieces.reduce((sum, [, value]) => sum + (value(way) || 0), 0);
    const most = Math.max(...ways.map(total), reference || 0) * 1.05 || 1;
    const y = (value) => top + (height - top - bottom) * (1 - value / most);
    const image = draw("svg", box, { width: full, height, viewBox: `0 0 ${full} ${height}` });
    for (const tick of marks(most, 4)) {
      draw("line", image, { class: "grid", x1: left, x2: full - right, y1: y(tick), y2: y(tick) });
      draw("text", image, { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, even(format(tick)));
    }
    const room = (full - left - right - wholes.length * slot) / Math.max(1, cuts.length);
    const column = (way, x, breadth, label) => {
      const group = draw("g", image, { class: "column" });
      let sum = 0;
      const gap = breadth > 5 ? Math.min(breadth * 0.2, 8) : 0;
      for (const [name, value] of pieces) {
        const amount = value(way) || 0;
        if (amount <= 0) continue;
        draw("rect", group, { class: "piece", x: x + gap / 2, width: Math.max(1, breadth - gap), y: y(sum + amount),
          height: Math.max(0.5, y(sum) - y(sum + amount)), style: `fill:${color(name)}` });
        sum += amount;
      }
      draw("rect", group, { class: "hit", x, width: breadth, y: top, height: height - top - bottom });
      if (label) draw("text", image, { x: x + breadth / 2, y: height - bottom + 16, "text-anchor": "middle" }, label);
      tell(group, title(way), lines(way));
    };
    wholes.forEach((way, index) => column(way, left + index * slot, slot, short_name(way)));
    const every = Math.max(1, Math.ceil(34 / room));
    cuts.forEach((way, index) => column(way, left + wholes.length * slot + index * room, room, index % every ? "" : `${way.layer_id}`));
    draw("line", image, { class: "axis", x1: left, x2: full - right, y1: y(0), y2: y(0) });
    draw("text", image, { class: "title", x: left + wholes.length * slot + (cuts.length * room) / 2, y: height - 6, "text-anchor": "middle" },
      "cut after layer number");
    if (reference) {
      draw("line", image, { class: "reference", x1: left, x2: full - right, y1: y(reference), y2: y(reference) });
      draw("text", image, { class: "name", x: left, y: 13 }, `- - ${referenceText}: ${format(reference)}`);
    }
  };

  const scatter = (box, width, points, { x, y, formatX, formatY, titleX, titleY, log, marksY, front, same }) => {
    const height = Math.min(440, Math.max(280, width * 0.6)), left = 64, right = 16, top = 24, bottom = 44;
    const image = draw("svg", box, { width, height, viewBox: `0 0 ${width} ${height}` });
    const bend = log ? (value) => Math.log10(1 + value) : (value) => value;
    const mostX = Math.max(...points.map(x), same ? Math.max(...points.map(y)) : 0) * 1.08 || 1;
    const mostY = same ? mostX : bend(Math.max(...points.map(y))) * 1.08 || 1;
    const px = (value) => left + ((width - left - right) * value) / mostX;
    const py = (value) => top + (height - top - bottom) * (1 - bend(value) / mostY);
    if (same) {
      const reach = (factor) => `${px(mostX / Math.max(1, factor))},${py(mostX * Math.min(1, factor))}`;
      draw("polygon", image, { class: "band", points: `${px(0)},${py(0)} ${reach(0.9)} ${px(mostX)},${py(mostX)} ${reach(1.1)}` });
      draw("line", image, { class: "same", x1: px(0), y1: py(0), x2: px(mostX), y2: py(mostX) });
    }
    for (const tick of ticks(mostX, width < 500 ? 4 : 7)) {
      draw("line", image, { class: "grid", x1: px(tick), x2: px(tick), y1: top, y2: height - bottom });
      draw("text", image, { x: px(tick), y: height - bottom + 16, "text-anchor": "middle" }, even(formatX(tick)));
    }
    for (const tick of marksY(same ? mostX : Math.max(...points.map(y)) * 1.08 || 1)) {
      draw("line", image, { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) });
      draw("text", image, { x: left - 8, y: py(tick) + 4, "text-anchor": "end" }, even(formatY(tick)));
    }
    draw("text", image, { class: "title", x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, titleX);
    draw("text", image, { class: "title", x: 4, y: 14 }, titleY);
    if (front) {
      const path = front.map((index, place) => {
        const at = `${px(x(points[index]))} ${py(y(points[index]))}`;
        return place ? `H ${px(x(points[index]))} V ${py(y(points[index]))}` : `M ${at}`;
      });
      draw("path", image, { class: "front", d: path.join(" ") });
    }
    const chosen = new Set(front || []);
    points.forEach((way, index) => {
      const group = draw("g", image, { class: "point" });
      const best = way.name === data.winner;
      const name = isCut(way) ? "edge" : "upload";
      draw("circle", group, { class: "hit", cx: px(x(way)), cy: py(y(way)), r: 12 });
      draw("circle", group, { class: "dot", cx: px(x(way)), cy: py(y(way)), r: best ? 7 : chosen.has(index) ? 6 : 4.5,
        style: `fill:${color(name)};fill-opacity:${front && !chosen.has(index) ? 0.45 : 0.9}` });
      tell(group, title(way), summary(way));
    });
    // names of the points that matter, where they do not lie on each other
    const placed = [];
    const named = points.filter((way, index) => way.name === data.winner || !isCut(way) || chosen.has(index));
    named.sort((a, b) => (b.name === data.winner) - (a.name === data.winner) || isCut(a) - isCut(b));
    for (const way of named) {
      const words = way.name.length > 26 ? `…${way.name.slice(-25)}` : way.name;
      const wide = words.length * 6.6, cx = px(x(way)), cy = py(y(way));
      const flip = cx + 10 + wide > width - 4;
      const from = flip ? cx - 10 - wide : cx + 10;
      if (from < left - 40 || placed.some(([a, b, c]) => from < b && from + wide > a && Math.abs(cy - c) < 14)) continue;
      placed.push([from, from + wide, cy]);
      draw("text", image, { class: "name", x: flip ? cx - 10 : cx + 10, y: cy + 4, "text-anchor": flip ? "end" : "start" }, words);
    }
  };
  const powers = (most) => {
    const found = [0];
    for (const [size, count] of [[1, [10, 100]], [1024, [1, 10, 100]], [1024 ** 2, [1, 10, 100]], [1024 ** 3, [1, 10, 100]]]) {
      for (const times of count) if (size * times <= most) found.push(size * times);
    }
    return found;
  };

  chart(find("#agreement .chart"), (box, width) => {
    const points = networked.filter((way) => way.predicted);
    if (!points.length) return nothing(box, "There is no prediction to compare with.");
    scatter(box, width, points, { x: (way) => way.predicted.latency_ns, y: (way) => way.latency_ns, formatX: time, formatY: time,
      titleX: "predicted", titleY: "measured (band: within 10 %)", marksY: (most) => ticks(most, 5), same: true });
  });

  legend("#bytes", [["upload", "up"], ["download", "down"]]);
  chart(find("#bytes .chart"), (box, width) => {
    if (!networked.length) return nothing(box, "No request was answered.");
    columns(box, width, networked, { format: bytes, marks: binary, lines: summary,
      pieces: [["upload", (way) => way.bytes_up], ["download", (way) => way.bytes_down]] });
  });

  const powered = networked.filter((way) => way.edge_energy.value !== null || way.cloud_energy.value !== null);
  if (powered.length) legend("#energy", [["edge", "edge"], ["cloud", "cloud"]]);
  chart(find("#energy .chart"), (box, width) => {
    if (!powered.length) return nothing(box, "Nothing to draw: no energy was measured on either side.");
    const said = (reading) => (reading.value === null ? "unavailable" : `${joules(reading.value)} (${reading.status})`);
    columns(box, width, powered, { format: joules, marks: ticks,
      lines: (way) => [["edge", said(way.edge_energy)], ["cloud", said(way.cloud_energy)]],
      pieces: [["edge", (way) => way.edge_energy.value], ["cloud", (way) => way.cloud_energy.value]] });
  });

  chart(find("#pareto .bytes"), (box, width) => {
    if (!networked.length) return nothing(box, "No request was answered.");
    scatter(box, width, networked, { x: (way) => way.latency_ns, y: (way) => way.bytes_up + way.bytes_down, formatX: time, formatY: bytes,
      titleX: "latency", titleY: "bytes up and down (logarithmic)", log: true, marksY: powers,
      front: data.fronts.bytes.map((name) => networked.findIndex((way) => way.name === name)) });
  });
  const costly = networked.filter((way) => way.edge_energy.value !== null);
  if (!costly.length) for (const one of document.querySelectorAll("#pareto .joules")) one.remove();
  else {
    chart(find("#pareto .chart.joules"), (box, width) => {
      scatter(box, width, costly, { x: (way) => way.latency_ns, y: (way) => way.edge_energy.value, formatX: time, formatY: joules,
        titleX: "latency", titleY: "energy of the edge", marksY: (most) => ticks(most, 5),
        front: data.fronts.energy.map((name) => costly.findIndex((way) => way.name === name)) });
    });
  }

  if (locals.length) legend("#local", [["edge", "head"], ["encode", "to bytes"], ["tail", "from bytes, and tail"]]);
  chart(find("#local .chart"), (box, width) => {
    if (!locals.length) return nothing(box, "Not measured.");
    columns(box, width, locals, { format: time, marks: ticks, lines: summary,
      reference: data.whole_ns, referenceText: "the whole model",
      pieces: ["edge", "encode", "tail"].map((name) => [name, (way) => way.segments_ns[name]]) });
  });
  document.documentElement.dataset.drawn = "yes";
})();
