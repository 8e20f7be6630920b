// -- what a way has to tell ---------------------------------------------------------------------------------------
const SEGMENTS = {
  prepare: "prepare input", edge: "edge", encode: "encode", upload: "upload", transit: "in transit", queue: "queue",
  tail: "tail on the cloud", download: "download", finish: "decode answer",
};
const whole = (way) => way.latency_ns !== null;
const networked = data.ways.filter((way) => way.mode === "networked" || way.name === "edge-only").filter(whole);
const locals = data.ways.filter((way) => way.mode === "local" && way.name !== "edge-only").filter(whole);
const isCut = (way) => way.layer_id !== null && way.layer_id >= 0;
const shortName = (way) => ({ "edge-only": "edge", "cloud-only": "cloud", "cloud-only-file": "file" })[way.name];
const titleOf = (way) => (isCut(way) ? `after layer ${way.layer_id}: ${way.name}` : way.name);
const summary = (way) => {
  const said = [["latency", time(way.latency_ns)]];
  if (way.quartiles_ns) said.push(["quartiles", `${time(way.quartiles_ns[0])} to ${time(way.quartiles_ns[2])}`]);
  if (way.predicted) said.push(["predicted", time(way.predicted.latency_ns)]);
  for (const [name, label] of Object.entries(SEGMENTS)) {
    if (way.segments_ns[name]) said.push([label, time(way.segments_ns[name])]);
  }
  for (const [name, one] of Object.entries(data.engines)) {
    const own = one.cuts[way.name];
    if (own && way.mode === "networked") said.push([`head in ${name}`, `${time(own.latency_ns)}, head ${time(own.head_ns)}`]);
  }
  said.push(["up, down", `${bytes(way.bytes_up)}, ${bytes(way.bytes_down)}`]);
  said.push(["exact", `${way.exact} of ${way.requests - way.failed}`]);
  return said;
};
const NONE = "No request was answered.";

// -- blocks: neighbours with one block in their names ----------------------------------------------------------------
const folding = (rows, nameOf) => {
  const found = [];
  for (const one of rows) {
    const block = data.blocks[nameOf(one)];
    const last = found[found.length - 1];
    if (block !== undefined && last && last.block === block) last.rows.push(one);
    else found.push({ block, rows: [one] });
  }
  return found;
};
const fastest = (ways) => ways.reduce((best, way) => (way.latency_ns < best.latency_ns ? way : best));
const cutCount = networked.filter(isCut).length;
const foldable = folding(networked.filter(isCut), (way) => way.name).length < cutCount;
let view = foldable && cutCount > 40 ? "blocks" : "cuts";
const pressed = [];
const viewChoice = (box) => {
  if (!foldable) return;
  pressed.push(choice(box, "show", [["cuts", `every cut (${cutCount})`], ["blocks", "by block"]], view, (key) => {
    view = key;
    pressed.forEach((press) => press(key));
    repaint();
  }));
};
const chosenCuts = () => {
  if (view === "cuts") return networked;
  return folding(networked, (way) => (isCut(way) ? way.name : "")).map(({ rows }) => fastest(rows));
};

// -- the bars ----------------------------------------------------------------------------------------------------------
const open = new Set();
let order = "layers";
const others = Object.values(data.engines).flatMap((one) => Object.values(one.cuts).map((own) => own.latency_ns));
const slowest = Math.max(0, ...networked.map((way) => way.latency_ns), ...others); // a prediction far beyond stands at the end
const longest = Math.max(slowest, ...networked.map((way) => (way.predicted ? Math.min(way.predicted.latency_ns, 1.3 * slowest) : 0)));
const pieces = (way) => Object.keys(SEGMENTS).map((name) => [name, way.segments_ns[name]]);
const inEngines = (way) => Object.values(data.engines).filter((one) => one.cuts[way.name])
  .map(({ cuts }) => [["edge", cuts[way.name].head_ns], ["rest", cuts[way.name].latency_ns - cuts[way.name].head_ns]]);
const wayRow = (way, inner) => ({
  key: way.name, label: way.name, number: way.layer_id, tracks: [pieces(way), ...inEngines(way)], value: time(way.latency_ns), inner,
  mark: way.predicted ? way.predicted.latency_ns : null, best: way.name === data.winner, title: titleOf(way), lines: summary(way),
});
const stageRows = () => {
  if (view === "cuts") {
    const ways = [...networked];
    if (order === "fastest") ways.sort((a, b) => a.latency_ns - b.latency_ns);
    return ways.map((way) => wayRow(way, false));
  }
  const groups = folding(networked, (way) => (isCut(way) ? way.name : "")).map((group) => ({ ...group, best: fastest(group.rows) }));
  if (order === "fastest") groups.sort((a, b) => a.best.latency_ns - b.best.latency_ns);
  return groups.flatMap((group) => {
    if (group.rows.length === 1) return [wayRow(group.best, false)];
    const key = `block ${group.rows[0].layer_id}`;
    const times = group.rows.map((way) => way.latency_ns);
    const row = {
      ...wayRow(group.best, false), key, open: open.has(key), number: null,
      label: group.block, after: ` · ${group.rows.length} cuts`, span: [Math.min(...times), Math.max(...times)], mark: null,
      title: `block ${group.block}, ${group.rows.length} cuts; the fastest is ${titleOf(group.best)}`,
      best: group.rows.some((way) => way.name === data.winner),
      toggle: () => {
        open.has(key) ? open.delete(key) : open.add(key);
        stages();
      },
    };
    row.lines = [["fastest to slowest", `${time(row.span[0])} to ${time(row.span[1])}`], ...row.lines];
    const inside = order === "fastest" ? [...group.rows].sort((a, b) => a.latency_ns - b.latency_ns) : group.rows;
    return row.open ? [row, ...inside.map((way) => wayRow(way, true))] : [row];
  });
};
const stages = figure("#figure-stages", {
  name: "stages", title: `Where the time of a request goes: ${data.model}`, none: networked.length ? null : NONE,
  legend: [...Object.entries(SEGMENTS), ...(others.length ? [["rest", "network and cloud"]] : []), ...(networked.some((way) => way.predicted) ? [["tick", "predicted"]] : [])],
  controls: (box) => {
    viewChoice(box);
    const press = choice(box, "order", [["layers", "in order of layers"], ["fastest", "fastest first"]], order, (key) => {
      order = key;
      press(key);
      stages();
    });
  },
  paint: (width, paper) => bars(stageRows(), width, paper, { most: longest * 1.02, format: time, axis: "time from the call to the decoded answer" }),
  numbers: () => ({
    headers: ["way", "layer", "block", "latency_ns", "predicted_ns", ...Object.keys(SEGMENTS).map((name) => `${name}_ns`)],
    rows: networked.map((way) => [way.name, way.layer_id, data.blocks[way.name] ?? null, way.latency_ns,
      way.predicted ? way.predicted.latency_ns : null, ...Object.keys(SEGMENTS).map((name) => way.segments_ns[name] ?? null)]),
  }),
});

// -- dots --------------------------------------------------------------------------------------------------------------
const dot = (way, x, y, front) => ({
  key: way.name, x, y, title: titleOf(way), lines: summary(way), colour: isCut(way) ? "edge" : "upload",
  name: way.name === data.winner || !isCut(way) || (front && front.includes(way.name)) ? way.name : null,
  size: way.name === data.winner ? 7 : front && front.includes(way.name) ? 6 : 5, faint: Boolean(front) && !front.includes(way.name),
});
const important = (points) => points.sort((a, b) => b.size - a.size);
const foretold = networked.filter((way) => way.predicted);
figure("#figure-agreement", {
  name: "agreement", title: `Predicted against measured: ${data.model}`,
  none: foretold.length ? null : "There is no prediction to compare with.",
  legend: [["edge", "a cut"], ["upload", "the whole model on one side"]],
  paint: (width) => scatter(important(foretold.map((way) => dot(way, way.predicted.latency_ns, way.latency_ns))), width, {
    formatX: time, formatY: time, titleX: "predicted", titleY: "measured (band: within 10 %; both logarithmic)", same: true }),
  numbers: () => ({ headers: ["way", "layer", "predicted_ns", "measured_ns", "error_percent"],
    rows: foretold.map((way) => [way.name, way.layer_id, way.predicted.latency_ns, way.latency_ns, way.predicted.error_percent]) }),
});

// -- columns -----------------------------------------------------------------------------------------------------------
const column = (way, parts, said) => ({ key: way.name, whole: isCut(way) ? null : shortName(way), number: way.layer_id, title: titleOf(way), lines: said, pieces: parts });
const AXIS = "cut after layer number";
figure("#figure-bytes", {
  name: "bytes", title: `Bytes of a request: ${data.model}`, none: networked.length ? null : NONE, controls: viewChoice,
  legend: [["upload", "up"], ["download", "down"]],
  paint: (width) => columns(chosenCuts().map((way) => column(way, [["upload", way.bytes_up], ["download", way.bytes_down]], summary(way))), width,
    { format: bytes, marks: binary, axis: AXIS }),
  numbers: () => ({ headers: ["way", "layer", "bytes_up", "bytes_down"], rows: networked.map((way) => [way.name, way.layer_id, way.bytes_up, way.bytes_down]) }),
});

const powered = networked.filter((way) => way.edge_energy.value !== null || way.cloud_energy.value !== null);
figure("#figure-energy", {
  name: "energy", title: `Energy of a request's forwards: ${data.model}`, controls: viewChoice,
  none: powered.length ? null : "Nothing to draw: no energy was measured on either side.",
  legend: [["edge", "edge"], ["cloud", "cloud"]],
  paint: (width) => {
    const said = (reading) => (reading.value === null ? "unavailable" : `${joules(reading.value)} (${reading.status})`);
    return columns(chosenCuts().filter((way) => powered.includes(way)).map((way) => column(way,
      [["edge", way.edge_energy.value], ["cloud", way.cloud_energy.value]], [["edge", said(way.edge_energy)], ["cloud", said(way.cloud_energy)]])), width,
    { format: joules, marks: ticks, axis: AXIS });
  },
  numbers: () => ({ headers: ["way", "layer", "edge_j", "edge_status", "cloud_j", "cloud_status"],
    rows: powered.map((way) => [way.name, way.layer_id, way.edge_energy.value, way.edge_energy.status, way.cloud_energy.value, way.cloud_energy.status]) }),
});

const frontFigure = (selector, name, ways, cost, front, more, header) => figure(selector, {
  name, title: `Latency against ${more.what}: ${data.model}`, none: ways.length ? null : NONE,
  legend: [["edge", "a cut"], ["upload", "the whole model on one side"], ["accent", "beaten by none"]],
  paint: (width) => scatter(important(ways.map((way) => dot(way, way.latency_ns, cost(way), front))), width, {
    formatX: time, titleX: "latency", ...more,
    front: front.map((one) => ways.find((way) => way.name === one)).map((way) => ({ x: way.latency_ns, y: cost(way) })) }),
  numbers: () => ({ headers: ["way", "layer", "latency_ns", header, "beaten by none"],
    rows: ways.map((way) => [way.name, way.layer_id, way.latency_ns, cost(way), front.includes(way.name) ? "yes" : "no"]) }),
});
frontFigure("#figure-front-bytes", "front-bytes", networked, (way) => way.bytes_up + way.bytes_down, data.fronts.bytes,
  { what: "bytes", formatY: bytes, titleY: "bytes up and down (logarithmic)", log: true, marksY: powers }, "bytes");
frontFigure("#figure-front-energy", "front-energy", networked.filter((way) => way.edge_energy.value !== null), (way) => way.edge_energy.value,
  data.fronts.energy, { what: "energy of the edge", formatY: joules, titleY: "energy of the edge", marksY: (most) => ticks(most, 5) }, "edge_j");
const leaking = networked.filter((way) => data.leakage[way.name] !== undefined);
if (leaking.length) frontFigure("#figure-front-leakage", "front-leakage", leaking, (way) => data.leakage[way.name], data.fronts.leakage,
  { what: "leakage", formatY: (value) => even(`${Math.round(100 * value)} %`), titleY: "leakage", marksY: (most) => ticks(most, 5) }, "leakage");

// -- layers --------------------------------------------------------------------------------------------------------------
const SIDES = ["edge", "cloud"];
const took = (one, side) => (one[side] ? one[side].inference_ns : 0);
const layerFoldable = folding(data.layers, (one) => one.layer).length < data.layers.length;
let layerView = layerFoldable && data.layers.length > 40 ? "blocks" : "layers";
const openLayers = new Set();
const layerRow = (one, inner) => {
  const said = (side) => (one[side] ? time(one[side].inference_ns) : "–");
  const facts = [["type", one.layer_type], ["edge", said("edge")], ["cloud", said("cloud")]];
  for (const side of SIDES) {
    if (one[side] && one[side].cpu_ns !== null) facts.push([`CPU time, ${side}`, time(one[side].cpu_ns)]);
    if (one[side] && one[side].energy_j !== null) facts.push([`energy, ${side}`, joules(one[side].energy_j)]);
  }
  if (one.output_bytes !== null) facts.push(["output", bytes(one.output_bytes)]);
  if (one.shape) facts.push([one.dtype, one.shape]);
  return { key: `${one.layer_id} ${one.layer}`, label: one.layer, number: one.layer_id, inner, tracks: SIDES.map((side) => [[side, took(one, side)]]),
    value: `${said("edge")} · ${said("cloud")}`, title: one.layer_id === null ? one.layer : `layer ${one.layer_id}: ${one.layer}`, lines: facts };
};
const layerRows = () => {
  if (layerView === "layers") return data.layers.map((one) => layerRow(one, false));
  return folding(data.layers, (one) => (one.layer_id === null ? "" : one.layer)).flatMap(({ block, rows }) => {
    if (rows.length === 1) return [layerRow(rows[0], false)];
    const key = `block ${rows[0].layer_id}`;
    const sum = (side) => rows.reduce((total, one) => total + took(one, side), 0);
    const ran = (side) => rows.some((one) => one[side]);
    const said = (side) => (ran(side) ? time(sum(side)) : "–");
    const row = { key, label: block, after: ` · ${rows.length} layers`, number: null, tracks: SIDES.map((side) => [[side, sum(side)]]), value: `${said("edge")} · ${said("cloud")}`,
      title: `block ${block}, ${rows.length} layers: the sum of their medians`, lines: SIDES.map((side) => [side, said(side)]), open: openLayers.has(key),
      toggle: () => {
        openLayers.has(key) ? openLayers.delete(key) : openLayers.add(key);
        layers();
      } };
    return row.open ? [row, ...rows.map((one) => layerRow(one, true))] : [row];
  });
};
const layers = figure("#figure-layers", {
  name: "layers", title: `Layers on both sides: ${data.model}`, none: data.layers.length ? null : "No layer was measured.",
  legend: [["edge", "edge"], ["cloud", "cloud"]],
  controls: (box) => {
    if (!layerFoldable) return;
    const press = choice(box, "show", [["layers", `every layer (${data.layers.filter((one) => one.layer_id !== null).length})`], ["blocks", "by block"]], layerView, (key) => {
      layerView = key;
      press(key);
      layers();
    });
  },
  paint: (width, paper) => {
    const rows = layerRows();
    // what lies outside layers is often longer than each of them, and would make them all short
    const sums = rows.filter((row) => !row.title.startsWith("outside")).flatMap((row) => row.tracks.map(([[, value]]) => value));
    return bars(rows, width, paper, { most: Math.max(1, ...sums) * 1.02, format: time, axis: "time in the layer, median", valueWidth: 150 });
  },
  numbers: () => ({
    headers: ["layer", "name", "type", "block", "edge_ns", "cloud_ns", "edge_cpu_ns", "cloud_cpu_ns", "edge_j", "cloud_j", "output_bytes", "dtype", "shape"],
    rows: data.layers.map((one) => [one.layer_id === null ? "" : one.layer_id, one.layer, one.layer_type, data.blocks[one.layer] ?? null,
      ...["inference_ns", "cpu_ns", "energy_j"].flatMap((column_) => SIDES.map((side) => (one[side] ? one[side][column_] : null))), one.output_bytes, one.dtype, one.shape]),
  }),
});

figure("#figure-local", {
  name: "local", title: `What splitting costs by itself: ${data.model}`, none: locals.length ? null : "Not measured.", controls: viewChoice,
  legend: [["edge", "head"], ["encode", "to bytes"], ["tail", "from bytes, and tail"]],
  paint: (width) => {
    const names = view === "blocks" ? new Set(chosenCuts().map((way) => way.name)) : null;
    const shown = locals.filter((way) => !names || names.has(way.name));
    return columns((shown.length ? shown : locals).map((way) => column(way, ["edge", "encode", "tail"].map((name) => [name, way.segments_ns[name]]), summary(way))), width,
      { format: time, marks: ticks, reference: data.whole_ns, referenceText: "the whole model", axis: AXIS });
  },
  numbers: () => ({ headers: ["way", "layer", "head_ns", "to_bytes_ns", "tail_ns", "whole_model_ns"],
    rows: locals.map((way) => [way.name, way.layer_id, ...["edge", "encode", "tail"].map((name) => way.segments_ns[name]), data.whole_ns]) }),
});

// -- attention -----------------------------------------------------------------------------------------------------------
await Promise.all(data.attention.map(async ({ input, picture, maps }, index) => {
  if (!maps.length) return;
  // all at once: the page's load, for which printing waits, waits for pictures that are under way by then
  const sound = (await Promise.all(maps.map(async (map) => {
    try {
      const [seen, over] = await Promise.all([decoded(map.picture), map.over ? decoded(map.over) : null]);
      return { ...map, seen, over };
    } catch { return null; } // a damaged picture: the others are good
  }))).filter((map) => map !== null);
  let way = picture && sound.some((map) => map.over) ? "over" : "grid";
  const able = () => [...sound.keys()].filter((at) => way === "grid" || sound[at].over);
  const chosen = new Set([0, 0.5, 1].map((share) => able()[Math.floor(share * (able().length - 1))]));
  const shown = () => able().filter((at) => chosen.has(at)).map((at) => sound[at]);
  const again = figure(`#figure-attention-${index}`, {
    name: `attention-${index + 1}`, title: `Attention: ${input}`, table: false,
    none: sound.length ? null : "The pictures that came are damaged.",
    controls: (box) => {
      const layersBox = html("div", null);
      layersBox.setAttribute("role", "group");
      layersBox.setAttribute("aria-label", "layers beside each other");
      const list = () => {
        layersBox.replaceChildren();
        html("span", layersBox, "what", "layers:").setAttribute("aria-hidden", "true");
        for (const at of able()) {
          const button = html("button", layersBox, "", sound[at].name.length > 34 ? `…${sound[at].name.slice(-33)}` : sound[at].name);
          button.type = "button";
          button.title = `${sound[at].name}, on the ${sound[at].side}`;
          button.setAttribute("aria-pressed", String(chosen.has(at)));
          button.addEventListener("click", () => {
            chosen.has(at) ? chosen.delete(at) : chosen.add(at);
            button.setAttribute("aria-pressed", String(chosen.has(at)));
            again();
          });
        }
      };
      if (picture && sound.some((map) => map.over)) {
        const press = choice(box, "as", [["over", "over the input"], ["grid", "queries by keys"]], way, (key) => {
          way = key;
          press(key);
          list();
          again();
        });
      }
      box.append(layersBox);
      list();
    },
    paint: (width, paper) => (shown().length ? heat(shown(), picture, way, width, paper) : []),
    numbers: () => ({
      headers: ["input", "side", "module", way === "over" ? "row" : "query", way === "over" ? "column" : "key", "share of the greatest", "weight"],
      rows: shown().flatMap((map) => {
        const [seen, most] = way === "over" ? [map.over, map.overMost] : [map.seen, map.most];
        return seen.levels.map((level, at) => [input, map.side, map.name, Math.floor(at / seen.columns), at % seen.columns, level * level, most === null ? null : level * level * most]);
      }),
    }),
  });
}));
document.documentElement.dataset.drawn = "yes";
