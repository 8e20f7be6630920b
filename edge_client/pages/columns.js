// -- columns over the layers: whole ways first, then the cuts; they always fit -----------------------------------------
/* `items`: [{key, whole: short name or null, number, title, lines, pieces: [[colour, value]]}] */
const columns = (items, width, { format, marks, axis, reference, referenceText }) => {
  const height = 280, left = 66, right = 10, top = reference ? 24 : 12, bottom = 46;
  const wholes = items.filter((one) => one.whole), cuts = items.filter((one) => !one.whole);
  const slot = wholes.length ? (width < 500 ? 32 : 46) : 0;
  const total = (one) => one.pieces.reduce((sum, [, value]) => sum + (value || 0), 0);
  const most = Math.max(...items.map(total), reference || 0) * 1.05 || 1;
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  const image = svg(width, height);
  for (const tick of marks(most, 4)) {
    draw("line", image, { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) });
    draw("text", image, { x: left - 8, y: y(tick) + 4, class: "end" }, even(format(tick)));
  }
  const room = (width - left - right - wholes.length * slot) / Math.max(1, cuts.length);
  const column = (one, x, breadth, label) => {
    const group = draw("g", image, { class: "column" });
    group.dataset.key = one.key;
    let sum = 0;
    const gap = breadth > 5 ? Math.min(breadth * 0.2, 10) : 0;
    for (const [name, value] of one.pieces) {
      const amount = value || 0;
      if (amount <= 0) continue;
      draw("rect", group, { class: `piece ${name}`, x: x + gap / 2, width: Math.max(0.8, breadth - gap), y: y(sum + amount),
        height: Math.max(0.5, y(sum) - y(sum + amount)), style: `fill:${color(name)}${breadth > 6 ? "" : ";stroke:none"}` });
      sum += amount;
    }
    draw("rect", group, { class: "hit", x, width: breadth, y: top, height: height - top - bottom });
    if (label) draw("text", image, { x: x + breadth / 2, y: height - bottom + 16, class: "mid" }, label);
    tell(group, one.title, one.lines);
  };
  wholes.forEach((one, index) => column(one, left + index * slot, slot, one.whole));
  const every = Math.max(1, Math.ceil(30 / room));
  cuts.forEach((one, index) => column(one, left + wholes.length * slot + index * room, room, index % every ? "" : `${one.number}`));
  draw("line", image, { class: "axis", x1: left, x2: width - right, y1: y(0), y2: y(0) });
  if (cuts.length) draw("text", image, { x: left + wholes.length * slot + (cuts.length * room) / 2, y: height - 8, class: "mid" }, axis);
  if (reference) {
    draw("line", image, { class: "reference", x1: left, x2: width - right, y1: y(reference), y2: y(reference) });
    draw("text", image, { class: "name", x: left, y: 14 }, `- - ${referenceText}: ${format(reference)}`);
  }
  return [image];
};
