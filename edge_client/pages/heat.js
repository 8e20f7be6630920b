// -- heat maps: large, with a scale, beside each other or over the input's picture -------------------------------------
const STOPS = [[0, 0, 0], [120, 28, 109], [237, 105, 37], [252, 255, 164]]; // as shared_hooks.observers.pictures has it
const heated = (share) => {
  const at = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1), below = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[below].map((value, index) => Math.round(value + (STOPS[below + 1][index] - value) * (at - below)));
};
const painted = (wide_, high, level) => { // level(index): 0 to 1
  const ground = canvas(wide_, high), brush = ground.getContext("2d"), pixels = brush.createImageData(wide_, high);
  for (let index = 0; index < wide_ * high; index += 1) pixels.data.set([...heated(level(index)), 255], index * 4);
  brush.putImageData(pixels, 0, 0);
  return ground.toDataURL();
};
const decoded = async (picture) => { // levels: square roots of shares of the greatest weight
  const image = new Image();
  await new Promise((done, failed) => { // the page's load waits for it, and printing for the load: not so for decode()
    Object.assign(image, { onload: done, onerror: failed, src: `data:image/png;base64,${picture}` });
  });
  const ground = canvas(image.naturalWidth, image.naturalHeight), brush = ground.getContext("2d", { willReadFrequently: true });
  brush.drawImage(image, 0, 0);
  const grey = brush.getImageData(0, 0, ground.width, ground.height).data;
  const levels = Array.from({ length: ground.width * ground.height }, (_, index) => grey[index * 4] / 255);
  return { columns: ground.width, rows: ground.height, levels, picture: painted(ground.width, ground.height, (index) => levels[index]) };
};
const weight = (value) => (value === 0 ? "0" : value.toPrecision(2));
let scalePicture = null;

const scaleBar = (image, x, y, breadth, most) => {
  scalePicture = scalePicture || painted(128, 1, (index) => index / 127);
  draw("image", image, { href: scalePicture, x, y, width: breadth, height: 10, preserveAspectRatio: "none" });
  draw("rect", image, { class: "frame", x, y, width: breadth, height: 10 });
  for (const level of [0, 0.5, 1]) {
    const text = most === null ? ["0", "1/4", "greatest"][level * 2] : weight(most * level * level);
    draw("text", image, { x: x + breadth * level, y: y + 24, class: level === 1 ? "end" : level ? "mid" : "" }, text);
  }
};

/* `maps`: [{side, name, shape, seen: decoded or null, most, over: decoded or null, overMost}], of one input whose picture
   is `input` (or null); `way`: "grid" or "over". */
const heat = (maps, input, way, width, paper) => {
  const across = Math.max(1, Math.min(maps.length, Math.floor(width / 220), 4));
  const gap = 22, cell = Math.min(460, (width - gap * (across - 1)) / across);
  const rows = [];
  for (let at = 0; at < maps.length; at += across) rows.push(maps.slice(at, at + across));
  const high = (map) => {
    const seen = way === "over" ? map.over : map.seen;
    return Math.min(cell, Math.max(40, (cell * seen.rows) / seen.columns));
  };
  return rows.map((row) => {
    const tall = Math.max(...row.map(high));
    const image = svg(width, tall + 100);
    row.forEach((map, place) => {
      const seen = way === "over" ? map.over : map.seen, most = way === "over" ? map.overMost : map.most;
      const x = place * (cell + gap), y = 24, height = high(map);
      const group = draw("g", image, { class: "map" });
      group.dataset.key = `${map.side} ${map.name} ${place}`;
      draw("text", group, { x, y: 15, class: "best" }, map.side);
      const after = wide(map.side, true) + 8;
      draw("text", group, { x: x + after, y: 15, class: "ink" }, fit(map.name, cell - after));
      if (way === "over") draw("image", group, { href: input, x, y, width: cell, height, preserveAspectRatio: "none" });
      draw("image", group, { href: seen.picture, x, y, width: cell, height, preserveAspectRatio: "none", class: "cells", ...(way === "over" ? { opacity: 0.6 } : {}) });
      draw("rect", group, { class: "frame hit", x, y, width: cell, height });
      const [, heads, queries, keys] = map.shape.length === 4 ? map.shape : [1, 0, seen.rows, seen.columns];
      const about = way === "over" ? `${seen.rows} by ${seen.columns} places of the picture` : `${queries} queries down, ${keys} keys across`;
      draw("text", group, { x, y: y + height + 16 }, about);
      scaleBar(group, x, y + height + 26, Math.min(cell, 220), most);
      const said = [["on the", map.side], ["shown", about], ["heads", `${heads || "unknown"}, their mean`]];
      if (most !== null) said.push(["greatest weight", weight(most)]);
      tell(group, map.name, said);
    });
    return image;
  });
};
