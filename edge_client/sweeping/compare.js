// -- two sweeps: how much longer B takes than A, and both beside each other -------------------------------------------
const VERDICTS = { slower: "slower", faster: "faster", "no difference seen": "unsure", "too few to say": "unsure" };
const BESIDE = { "end to end": "end to end", prepare: "prepare input", edge: "edge", encode: "encode", network: "network", queue: "queue", tail: "tail on the cloud", finish: "decode answer" };
const STAGES = Object.keys(BESIDE).filter((stage) => data.compared.some((one) => one.stage === stage));
const nameOf = (one) => (one.mode === "local" && one.way !== "edge-only" ? `${one.way} (local)` : one.way);
const linesOf = (one) => [["A", time(one.a_ns)], ["B", time(one.b_ns)], ["B / A", one.ratio === null ? "–" : one.ratio.toFixed(3)],
  ["interval", one.low === null ? "–" : `${one.low.toFixed(3)} to ${one.high.toFixed(3)}`], ["requests", `${one.n_a} and ${one.n_b}`], ["B is", one.verdict]];
const numbersOf = (stage) => ({
  headers: ["way", "mode", "stage", "a_ns", "b_ns", "ratio", "low", "high", "B is"],
  rows: data.compared.filter((one) => one.stage === stage).map((one) => [one.way, one.mode, one.stage, one.a_ns, one.b_ns, one.ratio, one.low, one.high, one.verdict]),
});
const NOTHING = data.compared.length ? null : "No way to run a request is in both.";
const local = data.compared.some((one) => nameOf(one) !== one.way);
const chosen = (stage, kind) => data.compared.filter((one) => one.stage === stage && (kind === "all" || nameOf(one) === one.way));

/* A dot on a line each, over a logarithmic axis through 1. */
const ratios = (rows, width, narrow) => {
  const step = narrow ? 36 : 22, labels = narrow ? 0 : Math.min(340, Math.max(200, width * 0.3));
  const left = narrow ? 10 : labels + 16, right = width - (narrow ? 14 : 150), above = 26, height = above + rows.length * step + 44;
  const image = svg(width, height);
  const values = rows.flatMap((one) => [one.ratio, one.low, one.high]).filter((value) => value > 0);
  const most = Math.min(8, Math.max(1.25, ...values.map((value) => Math.max(value, 1 / value)))) * 1.05;
  const x = (value) => left + ((right - left) * (Math.log(Math.min(most, Math.max(1 / most, value))) + Math.log(most))) / (2 * Math.log(most));
  const bottom = above + rows.length * step + 2;
  const steps = most > 3 ? [0.125, 0.25, 0.5, 1, 2, 4, 8] : most > 1.6 ? [0.4, 0.5, 0.7, 1, 1.5, 2, 2.5] : [0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4];
  let last = -Infinity;
  for (const tick of steps.filter((one) => one >= 1 / most && one <= most)) {
    draw("line", image, { class: tick === 1 ? "reference" : "grid", x1: x(tick), x2: x(tick), y1: above - 4, y2: bottom });
    if (x(tick) - last < 34) continue;
    last = x(tick);
    for (const y of [above - 10, bottom + 15]) draw("text", image, { x: x(tick), y, class: "mid" }, `${tick}×`);
  }
  draw("text", image, { x: (left + right) / 2, y: bottom + 34, class: "mid" }, "B takes less  ·  B / A, logarithmic  ·  B takes more");
  rows.forEach((one, place) => {
    const top = above + place * step, middle = top + (narrow ? 25 : step / 2);
    const group = draw("g", image, { class: "row" });
    group.dataset.key = nameOf(one);
    draw("rect", group, { class: "back", x: 0, y: top, width, height: step, rx: 4 });
    draw("text", group, { x: 4, y: top + 15, class: "ink label" }, fit(nameOf(one), narrow ? width - 140 : labels - 4));
    draw("text", group, { x: width - 4, y: top + 15, class: "end value" }, one.ratio === null ? "–" : `${one.ratio.toFixed(2)}× ${one.verdict.split(" ")[0] === "no" ? "" : one.verdict}`);
    const name = VERDICTS[one.verdict];
    if (one.low !== null) draw("path", group, { class: "interval", d: `M ${x(one.low)} ${middle} H ${x(one.high)}`, style: `stroke:${color(name)};stroke-width:3` });
    if (one.ratio !== null) {
      // shown by its form, too, not by colour alone
      const at = x(one.ratio), forms = { slower: `M ${at - 6} ${middle - 6} l 11 6 l -11 6 z`, faster: `M ${at + 6} ${middle - 6} l -11 6 l 11 6 z` };
      draw("path", group, { class: "dot", style: `fill:${color(name)}`, d: forms[one.verdict] || `M ${at - 5} ${middle} a 5 5 0 1 0 10 0 a 5 5 0 1 0 -10 0` });
    }
    tell(group, nameOf(one), linesOf(one));
  });
  return image;
};

const choices = (box, state, again) => {
  if (STAGES.length > 1) {
    const press = choice(box, "stage", STAGES.map((one) => [one, BESIDE[one] || one]), state.stage, (key) => {
      state.stage = key;
      press(key);
      again();
    });
  }
  if (local) {
    const press = choice(box, "show", [["networked", "through the server"], ["all", "and in one process"]], state.kind, (key) => {
      state.kind = key;
      press(key);
      again();
    });
  }
};
const state = { stage: STAGES[0], kind: "networked" }, beside = { ...state };
const inPages = (rows, paper, paint) => {
  const many = paper ? 34 : Infinity, parts = [];
  for (let at = 0; at < Math.max(1, rows.length); at += many) parts.push(paint(rows.slice(at, at + many)));
  return parts;
};
const ratioFigure = figure("#figure-ratios", {
  name: "ratios", title: "B / A, way by way", none: NOTHING,
  legend: [["slower", "B is slower (points right)"], ["faster", "B is faster (points left)"], ["unsure", "no difference seen, or too few to say (round)"]],
  controls: (box) => choices(box, state, () => ratioFigure()),
  paint: (width, paper) => inPages(chosen(state.stage, state.kind), paper, (rows) => ratios(rows, width, width < 560)),
  numbers: () => numbersOf(state.stage),
});
const timesFigure = figure("#figure-times", {
  name: "times", title: "Medians of A and B", none: NOTHING, legend: [["a", `A: ${data.a}`], ["b", `B: ${data.b}`]],
  controls: (box) => choices(box, beside, () => timesFigure()),
  paint: (width, paper) => {
    const rows = chosen(beside.stage, beside.kind);
    const most = Math.max(1, ...rows.flatMap((one) => [one.a_ns, one.b_ns])) * 1.02;
    return bars(rows.map((one) => ({ key: nameOf(one), label: nameOf(one), number: null, tracks: [[["a", one.a_ns]], [["b", one.b_ns]]],
      value: `${time(one.a_ns)} · ${time(one.b_ns)}`, title: nameOf(one), lines: linesOf(one) })), width, paper,
    { most, format: time, axis: `${BESIDE[beside.stage] || beside.stage}, median`, valueWidth: 150 });
  },
  numbers: () => numbersOf(beside.stage),
});
document.documentElement.dataset.drawn = "yes";
