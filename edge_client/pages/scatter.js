// -- dots in two coordinates, those that matter named ---------------------------------------------------------------------
/* `points`: [{key, x, y, title, lines, name: shown beside it or null, colour, size, faint}] */
const powers = (most) => {
  const found = [0];
  for (const size of [1, 1024, 1024 ** 2, 1024 ** 3]) for (const times of [1, 10, 100]) if (size * times <= most && size * times > 1) found.push(size * times);
  return found;
};
const scatter = (points, width, { formatX, formatY, titleX, titleY, log, marksY, front, same }) => {
  const height = Math.min(460, Math.max(300, width * 0.5)), left = 70, right = 16, top = 28, bottom = 48;
  const image = svg(width, height);
  const both = points.flatMap((one) => [one.x, one.y]).filter((value) => value > 0);
  const least = same ? Math.min(...both) * 0.85 : 0; // two times on one logarithmic scale; else from nothing up
  const mostX = same ? Math.max(...both) * 1.15 : Math.max(...points.map((one) => one.x)) * 1.08 || 1;
  const mostY = same ? mostX : Math.max(...points.map((one) => one.y)) * (log ? 1.4 : 1.08) || 1;
  const bendX = same ? (value) => Math.log10(Math.max(value, least) / least) : (value) => value;
  const bendY = same ? bendX : log ? (value) => Math.log10(1 + value) : (value) => value;
  const px = (value) => left + ((width - left - right) * bendX(value)) / bendX(mostX);
  const py = (value) => top + (height - top - bottom) * (1 - bendY(value) / bendY(mostY));
  if (same) {
    const reach = (value, factor) => `${px(Math.min(value, mostX / factor))},${py(Math.min(value, mostX / factor) * factor)}`;
    const low = (value, factor) => `${px(Math.max(value, least / factor))},${py(Math.max(value, least / factor) * factor)}`;
    draw("polygon", image, { class: "band", points: `${px(least)},${py(least)} ${low(least, 1.1)} ${reach(mostX, 1.1)} ${px(mostX)},${py(mostX)} ${reach(mostX, 0.9)} ${low(least, 0.9)}` });
    draw("line", image, { class: "same", x1: px(least), y1: py(least), x2: px(mostX), y2: py(mostX) });
  }
  const steps = [];
  for (let power = 1; power < 1e15; power *= 10) for (const times of mostX / least > 30 ? [1, 3] : [1, 2, 3, 5, 7]) if (times * power >= least && times * power <= mostX) steps.push(times * power);
  let last = -Infinity;
  for (const tick of same ? steps : ticks(mostX, width < 500 ? 3 : 7)) {
    draw("line", image, { class: "grid", x1: px(tick), x2: px(tick), y1: top, y2: height - bottom });
    if (px(tick) - last < 58) continue;
    last = px(tick);
    draw("text", image, { x: px(tick), y: height - bottom + 16, class: px(tick) > width - 24 ? "end" : "mid" }, even(formatX(tick)));
  }
  let lowest = Infinity; // names of ticks do not lie on each other
  for (const tick of same ? steps : marksY(mostY)) {
    draw("line", image, { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) });
    if (lowest - py(tick) < 14) continue;
    lowest = py(tick);
    draw("text", image, { x: left - 8, y: py(tick) + 4, class: "end" }, even(formatY(tick)));
  }
  draw("text", image, { x: (left + width - right) / 2, y: height - 10, class: "mid" }, titleX);
  draw("text", image, { x: 2, y: 14 }, titleY);
  if (front && front.length) {
    const path = front.map((one, place) => (place ? `H ${px(one.x)} V ${py(one.y)}` : `M ${px(one.x)} ${py(one.y)}`));
    draw("path", image, { class: "front", d: path.join(" ") });
  }
  for (const one of points) {
    const group = draw("g", image, { class: "point" });
    group.dataset.key = one.key;
    draw("circle", group, { class: "hit", cx: px(one.x), cy: py(one.y), r: 12 });
    draw("circle", group, { class: one.faint ? "dot faint" : "dot", cx: px(one.x), cy: py(one.y), r: one.size || 5, style: `fill:${color(one.colour)}` });
    tell(group, one.title, one.lines);
  }
  const placed = [];
  for (const one of points.filter((each) => each.name)) {
    const words = fit(one.name, 180, true), length = wide(words, true) + 2, cx = px(one.x), cy = py(one.y);
    const flip = cx + 10 + length > width - 2;
    const from = flip ? cx - 10 - length : cx + 10;
    if (from < left - 40 || placed.some(([a, b, c]) => from < b && from + length > a && Math.abs(cy - c) < 15)) continue;
    placed.push([from, from + length, cy]);
    draw("text", image, { class: flip ? "name end" : "name", x: flip ? cx - 10 : cx + 10, y: cy + 4 }, words);
  }
  return [image];
};
