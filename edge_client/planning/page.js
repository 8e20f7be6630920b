const HEIGHT = 26, STEP = 58;
const graph = ({ nodes, edges }, width) => {
  const levels = Math.max(...nodes.map((one) => one.level)) + 1;
  const image = svg(width, levels * STEP + 12);
  const room = (one) => width / one.lanes;
  const wideOf = (one) => Math.min(190, room(one) - 10);
  const px = (one) => (one.lane + 0.5) * room(one), py = (one) => one.level * STEP + HEIGHT / 2 + 4;
  const labels = [];
  for (const edge of edges) {
    const a = nodes[edge.from], b = nodes[edge.to], group = draw("g", image, {});
    const down = py(b) - py(a) - HEIGHT, far = b.level - a.level > 1 ? Math.min(width / 3, 40 * Math.log2(b.level - a.level) + wideOf(a) / 2) : 0;
    const side = px(a) > width / 2 ? 1 : -1, inside = (x) => Math.min(width - 4, Math.max(4, x));
    const from = [px(a), py(a) + HEIGHT / 2], to = [px(b), py(b) - HEIGHT / 2];
    const first = [inside(from[0] + side * far), from[1] + Math.max(14, down / 3)], last = [inside(to[0] + side * far), to[1] - Math.max(14, down / 3)];
    draw("path", group, { class: "line", d: `M${from} C${first} ${last} ${to}`, style: `stroke:${color(edge.crosses ? "upload" : "soft")};stroke-width:${edge.crosses ? 3 : 1.2}` });
    const late = (at) => 0.027 * from[at] + 0.189 * first[at] + 0.441 * last[at] + 0.343 * to[at]; // of the curve, at 0.7
    if (edge.crosses) labels.push([edge, late(0), late(1) + 4]);
    tell(group, `${a.name} to ${b.name}`, [...(edge.bytes ? [["bytes", bytes(edge.bytes)]] : []), ["crosses", edge.crosses ? "yes" : "no"]]);
  }
  for (const one of nodes) {
    const group = draw("g", image, {}), across = wideOf(one);
    draw("rect", group, { x: px(one) - across / 2, y: py(one) - HEIGHT / 2, width: across, height: HEIGHT, rx: 4, style: `fill:var(--paper);stroke:${color(one.edge ? "edge" : "tail")};stroke-width:2` });
    const text = one.count > 1 ? `${one.name} (${one.count})` : one.name;
    draw("text", group, { x: px(one), y: py(one) + 4, class: "ink mid" }, fit(text, across - 10));
    tell(group, text, [["runs on", one.edge ? "the edge" : "the server"], ...(one.count ? [["takes", time(one.ns)]] : [])]);
  }
  for (const [edge, x, y] of labels) {
    const text = bytes(edge.bytes), half = wide(text) / 2 + 4;
    draw("text", image, { x: Math.min(width - half, Math.max(half, x)), y, class: "label mid" }, text);
  }
  return [image];
};
if (data.graph) {
  figure("#figure-graph", {
    name: "graph", title: `What runs where: ${data.model}`,
    legend: [["edge", "on the edge"], ["tail", "on the server"], ["upload", "crosses"]],
    paint: (width) => graph(data.graph, width),
    numbers: () => ({
      headers: ["from", "to", "bytes", "crosses"],
      rows: data.graph.edges.map((one) => [data.graph.nodes[one.from].name, data.graph.nodes[one.to].name, one.bytes, one.crosses ? "yes" : ""]),
    }),
    table: data.graph.edges.length <= 60,
  });
}
document.documentElement.dataset.drawn = "yes";
