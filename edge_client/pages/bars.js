// -- stacked bars, a row each, over one axis -----------------------------------------------------------------------------
/* A row: {key, label, number, tracks: [[[colour, value], ...], ...], value: text, mark, span: [low, high], best, title,
   lines, toggle: function, open, inner}. The axis stands below, and above, too, where there are many. */
const bars = (rows, width, paper, { most, format, axis, valueWidth = 76, least = 0 }) => {
  const narrow = width < 560;
  const many = paper ? 34 : Infinity; // rows: a page of paper has room for as many
  const parts = [];
  for (let at = 0; at < Math.max(1, rows.length); at += many) {
    parts.push(barsPart(rows.slice(at, at + many), width, narrow, { most, format, axis, valueWidth, least }));
  }
  return parts;
};
const barsPart = (rows, width, narrow, { most, format, axis, valueWidth }) => {
  const step = narrow ? 38 : 22, thick = 16;
  const labels = narrow ? 2 : Math.min(340, Math.max(200, width * 0.3));
  const left = narrow ? 4 : labels + 10, right = width - (narrow ? 6 : valueWidth + 8);
  const above = rows.length > 16 ? 22 : 6;
  const height = above + rows.length * step + 40;
  const image = svg(width, height);
  const x = (value) => left + ((right - left) * Math.min(value, most)) / most;
  const bottom = above + rows.length * step + 2;
  const marks = ticks(most, Math.max(2, Math.floor((right - left) / 110)));
  for (const tick of marks) {
    draw("line", image, { class: "grid", x1: x(tick), x2: x(tick), y1: above - 4, y2: bottom });
    const end = tick === marks[marks.length - 1] && x(tick) > width - 24 ? "end" : tick || !narrow ? "mid" : "";
    draw("text", image, { x: x(tick), y: bottom + 15, class: end }, even(format(tick)));
    if (above > 6) draw("text", image, { x: x(tick), y: above - 8, class: end }, even(format(tick)));
  }
  draw("line", image, { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
  draw("text", image, { x: (left + right) / 2, y: bottom + 33, class: "mid" }, axis);
  rows.forEach((row, place) => {
    const top = above + place * step;
    const group = draw("g", image, { class: `row${row.best ? " best" : ""}` });
    group.dataset.key = row.key;
    draw("rect", group, { class: "back", x: 0, y: top, width, height: step, rx: 4 });
    const base = narrow ? top + 14 : top + 15;
    const indent = row.inner ? 14 : 0;
    const number = row.toggle ? (row.open ? "▾" : "▸") : row.number === null || row.number === undefined || row.number < 0 ? "" : `${row.number}`;
    if (number) draw("text", group, { x: 26 + indent, y: base, class: "end" }, number);
    const from = (number || !narrow ? 33 : 4) + (number ? indent : 0);
    const room = (narrow ? width - valueWidth - 16 : labels) - from;
    draw("text", group, { x: from, y: base, class: row.best ? "best label" : "ink label" }, fit(row.label, room - wide(row.after || "", row.best), row.best) + (row.after || ""));
    draw("text", group, { x: width - 4, y: base, class: "end value" }, row.value);
    const high = row.tracks.length > 1 ? 8 : narrow ? 12 : thick;
    row.tracks.forEach((pieces, line) => {
      const y = (narrow ? top + 19 : top + 3) + line * (high + (row.tracks.length > 1 ? 1 : 0));
      let sum = 0;
      for (const [name, value] of pieces) {
        if (!(value > 0)) continue;
        const breadth = x(sum + value) - x(sum);
        if (breadth > 0) draw("rect", group, { class: breadth > 3 ? `piece ${name}` : `piece ${name} thin`, x: x(sum), y, width: Math.max(0.6, breadth), height: high,
          style: `fill:${color(name)}${breadth > 3 ? "" : ";stroke:none"}` });
        if (sum + value > most * 1.001) { // longer than the scale: said so
          draw("path", group, { d: `M ${right - 7} ${y - 1} l 4 ${high / 2 + 1} l -4 ${high / 2 + 1} h 12 v ${-high - 2} z`, style: "fill:var(--paper)" });
          draw("text", group, { x: right + 1, y: y + high - 1, class: "over" }, "›");
        }
        sum += value;
      }
      if (row.mark !== null && row.mark !== undefined && line === 0) {
        draw("rect", group, { class: "mark", x: x(row.mark) - 2, y: y - 2, width: 4, height: high + 4 });
        if (row.mark > most) draw("text", group, { x: right + 4, y: y + high - 3, class: "ink" }, "›");
      }
    });
    if (row.span) {
      const y = (narrow ? top + 19 : top + 3) + high / 2;
      draw("path", group, { class: "span", d: `M ${x(row.span[0])} ${y - 4} v 8 m 0 -4 H ${x(row.span[1])} m 0 -4 v 8`, style: "fill:none" });
    }
    tell(group, row.title, row.lines, row.toggle ? "button" : "img");
    if (row.toggle) {
      group.setAttribute("aria-expanded", String(Boolean(row.open)));
      group.addEventListener("click", row.toggle);
    }
  });
  return image;
};
