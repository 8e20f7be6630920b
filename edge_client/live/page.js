// The page: takes what the stream sends, and draws it. All text goes in as text; nothing that is sent becomes markup.

import { bars, line, short, tail } from "/charts.js";

const SHOWN = 120, SPANS = [60, 120, 300, 600], NEWEST = 20, OLD = 10;
const GROUPS = {
  prepare: "prepare input", edge: "edge computes", encode: "encode, wait to send", upload: "upload",
  transit: "in transit, both ways", queue: "server queue", tail: "server computes", download: "download", finish: "edge finishes",
};
const LISTS = ["requests", "events", "link", "edge", "cloud"];
const id = (name) => document.getElementById(name);
let state = null, offset = 0, heard = 0, ended = false, paused = false, picked = null, places = { places: [], step: 1 }, waiting = false;
let seen = null, listed = 0, said = null, span = 60;

function make(kind, text = null, attributes = {}) {
  const made = document.createElement(kind);
  if (text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
function put(name, text) { const one = id(name); if (one.textContent !== text) one.textContent = text; }
const mbit = (bytes) => (bytes === null || bytes === undefined ? "-" : `${short((8 * bytes) / 1e6)} Mbit/s`);
const ms = (value) => (value === null || value === undefined ? "-" : `${short(value)} ms`);
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const last = (list) => list[list.length - 1];
const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour12: false });
function size(bytes) {
  for (const unit of ["B", "KiB", "MiB"]) { if (bytes < 1024) return `${short(bytes)} ${unit}`; bytes /= 1024; }
  return `${short(bytes)} GiB`;
}
const minutes = (span) => `${span / 60} minute${span > 60 ? "s" : ""}`;
function known(list, key) { for (let n = list.length - 1; n >= 0; n--) if (list[n][key] !== undefined && list[n][key] !== null) return list[n][key]; return null; }

// -- what the stream tells

function begin(whole) {
  state = whole;
  offset = Date.now() / 1000 - whole.now;
  seen = null; listed = 0; said = null; picked = null;
  state.requests.forEach(summed);
  about();
  show("live", "live");
  later();
}
function more(news) {
  for (const name of LISTS) {
    if (!news[name]) continue;
    if (name === "requests") news[name].forEach(summed);
    state[name].push(...news[name]);
    state[name].splice(0, Math.max(0, state[name].length - state.kept[name]));
  }
  for (const [name, value] of Object.entries(news)) if (!LISTS.includes(name)) state[name] = value;
  if (news.about) about();
  if (news.events) { listed += news.events.length; announce(news.events); }
  later();
}
function summed(request) {
  request.sums = {};
  state.about.stages.forEach(({ group }, index) => { request.sums[group] = (request.sums[group] || 0) + request.rows[index]; });
}
function announce(events) {
  const moves = events.filter((one) => one.kind === "moved");
  if (moves.length) { const one = last(moves); id("news").textContent = `The cut moved to ${one.new}: ${one.text}`; }
}
function show(kind, text) { id("state").dataset.state = kind; put("state", text); }
function later() {
  if (waiting || paused) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; if (!paused && state) draw(); });
}

// -- drawing

function draw() {
  const shown = state.requests.slice(-SHOWN), now = Date.now() / 1000 - offset;
  const first = Math.min(...["link", "edge", "cloud"].map((name) => state[name][0]?.at ?? now));
  span = SPANS.find((one) => one >= now - first) || last(SPANS);
  const marks = state.events.filter((one) => one.kind === "moved").map((one) => one.at);
  cards(shown, now);
  places = bars(id("stages"), shown, Object.keys(GROUPS), picked);
  chosen(shown);
  table(shown);
  line(id("chart-up"), state.link.map((one) => ({ at: one.at, value: one.up === null ? NaN : (8 * one.up) / 1e6 })), now, span, marks);
  line(id("chart-rtt"), state.link.map((one) => ({ at: one.at, value: one.rtt ?? NaN })), now, span, marks);
  links();
  if (said !== listed) { said = listed; events(); }
  choice();
  machines(now);
  observed();
  document.documentElement.dataset.drawn = "yes";
}
function about() {
  const { title, model, server, device } = state.about;
  put("title", title);
  document.title = `${title} - Isthmus`;
  put("about", [title === model ? null : model, server ? `server ${server}` : "no server", device && `edge on ${device}`].filter(Boolean).join(" · "));
  id("legend").replaceChildren(...Object.entries(GROUPS).map(([group, text]) => {
    const item = make("li"), swatch = make("i");
    swatch.className = `fill-${group}`;
    item.append(swatch, text);
    return item;
  }));
}
function cards(shown, now) {
  const newest = last(state.requests), few = shown.slice(-NEWEST).map((one) => one.ms).sort((a, b) => a - b);
  const move = state.events.filter((one) => one.kind === "moved").pop();
  put("now-cut", newest ? newest.cut : state.about.model ? "-" : "only watching");
  put("now-why", newest?.fallback || (move && move.new === newest?.cut ? move.text : ""));
  put("now-ms", few.length ? ms(few[Math.floor(few.length / 2)]) : "-");
  put("now-spread", few.length ? `median of ${few.length}; ${short(few[0])} to ${ms(last(few))}` : "");
  const recent = state.requests.filter((one) => one.at > now - 10);
  put("now-rate", `${short(recent.length / 10)} /s`);
  const { answered, failed, cancelled, left_out } = state.counts;
  put("now-counts", [`${answered} answered`, `${failed} failed`, cancelled && `${cancelled} overtaken`, left_out && `${left_out} not shown`].filter(Boolean).join(", "));
  put("now-up", speed());
  put("now-rtt", gone() ? "when the server was there" : `up; round trip ${ms(known(state.link, "rtt"))}`);
  const pending = known(state.cloud, "pending");
  put("now-queue", gone() ? "gone" : pending === null ? "-" : `${pending} waiting`);
  put("now-load", pending === null ? "nothing heard yet" : `${plural(known(state.cloud, "workers"), "worker")}, queue ${ms(known(state.cloud, "queue_ms"))}`);
}
function chosen(shown) {
  if (!shown.length) return put("chosen", "No request yet.");
  const one = shown.find((request) => request.number === picked) || last(shown);
  const parts = Object.entries(GROUPS).filter(([group]) => one.sums[group] >= 0.0005).map(([group, text]) => `${text} ${short(one.sums[group])}`);
  const chose = one.number === picked ? "" : "newest: ";
  const sends = one.sends > 1 ? `, sent ${one.sends} times` : "";
  if (document.activeElement === id("stages") && picked === null) return; // a screen reader is not to hear every request
  put("chosen", `${chose}request ${one.number}, cut ${one.cut}, ${ms(one.ms)}: ${parts.join(", ")} (ms); ${size(one.up)} up, ${size(one.down)} down${sends}`);
}
function table(shown) {
  const rows = state.about.stages.map(({ label }, index) => {
    const mean = shown.reduce((sum, one) => sum + one.rows[index], 0) / (shown.length || 1);
    return { label, mean, newest: last(shown)?.rows[index] ?? 0 };
  });
  const total = rows.reduce((sum, one) => sum + one.mean, 0);
  rows.push({ label: "sum", mean: total, newest: last(shown)?.ms ?? 0 });
  id("rows").replaceChildren(...rows.map(({ label, mean, newest }) => {
    const row = make("tr");
    row.append(make("th", label, { scope: "row" }), make("td", mean.toFixed(3)), make("td", total ? `${((100 * mean) / total).toFixed(1)} %` : "-"), make("td", newest.toFixed(3)));
    return row;
  }));
}
function speed() { return last(state.link)?.said || mbit(known(state.link, "up")); }
function gone() { return state.events.filter((one) => ["gone", "back", "found", "connected"].includes(one.kind)).pop()?.kind === "gone"; }
function links() {
  const up = known(state.link, "up"), rtt = known(state.link, "rtt"), by = last(state.link)?.by;
  put("link-up", up === null ? "" : speed());
  put("link-rtt", ms(rtt));
  put("link-by", !state.about.server ? "No server, no link." : !by ? "Nothing measured yet." : state.about.auto ? "As the controller believes it to be, from requests and from its probes; dashed lines are moves of the cut." : "By small probes, while this page is open; dashed lines are moves of the cut.");
  id("chart-up").setAttribute("aria-label", `Rate up over the last ${minutes(span)}, now ${speed()}`);
  for (const name of ["now-up", "link-up", "link-rtt"]) id(name).classList.toggle("gone", gone());
  id("chart-rtt").setAttribute("aria-label", `Round trip over the last ${minutes(span)}, now ${ms(rtt)}`);
}
function events() {
  id("events").replaceChildren(...state.events.slice(-100).reverse().map((one) => {
    const item = make("li", null, { "data-kind": one.kind }), text = make("div");
    if (one.new) { text.append(one.old ? `${one.old} → ` : "", make("b", one.new), one.text ? ": " : ""); }
    text.append(one.text);
    const numbers = [
      one.best_ms !== undefined && `${ms(one.best_ms)} predicted${one.held_ms ? `, ${ms(one.held_ms)} where it was` : ""}`,
      one.up !== undefined && one.up !== null && `link ${mbit(one.up)} up, ${ms(one.rtt)}`,
      one.queue_ms && `server queue ${ms(one.queue_ms)}`,
      one.edge_factor && `edge ${short(one.edge_factor)} x, server ${short(one.server_factor)} x as long as profiled`,
    ].filter(Boolean);
    if (numbers.length) text.append(make("small", numbers.join(" · ")));
    item.append(make("time", clock(one.at)), make("span", one.kind, { class: "kind" }), text);
    return item;
  }));
  if (!state.events.length) id("events").replaceChildren(make("li", "Nothing has happened yet."));
}
function choice() {
  const one = state.choice;
  if (!one) return put("choice", state.about.auto ? "The controller has not chosen yet." : "No controller chooses here: the cut is where it was set.");
  const better = one.best === one.candidate ? "which is the best" : `${one.best} is predicted at ${ms(one.best_ms)}`;
  put("choice", `Now ${one.candidate}, predicted at ${ms(one.predicted_ms)}; ${better} (${one.text || "held"}).`);
}
function machines(now) {
  const holder = id("machines");
  if (!holder.children.length) {
    for (const [side, title] of [["edge", "Edge, this machine"], ["cloud", "Cloud, the server's machine"]]) {
      const box = make("div", null, { class: "machine", id: `machine-${side}` });
      box.append(make("h3", title), make("p", null, { class: "who" }), make("div", null, { class: "chart spark", role: "img" }), make("dl"));
      holder.append(box);
    }
  }
  for (const side of ["edge", "cloud"]) {
    const box = id(`machine-${side}`), list = state[side];
    const who = side === "edge" ? state.about.device || "" : Object.entries(state.server || {}).map(([key, value]) => `${key} ${value}`).join(", ");
    box.querySelector(".who").textContent = who;
    line(box.querySelector(".chart"), list.map((one) => ({ at: one.at, value: one.cpu?.[0] ?? NaN })), now, span, [], true);
    box.querySelector(".chart").setAttribute("aria-label", `Processors over the last ${minutes(span)}, now ${short(known(list, "cpu")?.[0])} per cent`);
    const facts = [];
    const add = (name, key, shown) => { const one = known(list, key); if (one) facts.push([name, one[0] === null ? "unavailable" : `${shown(one[0])}${one[1] === "measured" ? "" : `, ${one[1]}`}`, one[0] === null ? one[2] : ""]); };
    add("processors", "cpu", (value) => `${short(value)} %`);
    if (known(list, "gpu")?.[0] !== null) add("GPU", "gpu", (value) => `${short(value)} %`);
    add("memory in use", "memory", (value) => `${short(value)} %`);
    add("process", "process", size);
    add("power", "power", (value) => `${short(value)} W`);
    const energy = last(state.requests)?.energy[side === "edge" ? 0 : 1];
    if (energy) facts.push(["energy, newest request", energy[0] === null ? "unavailable" : `${short(1000 * energy[0])} mJ, ${energy[1]}`, energy[0] === null ? energy[2] : ""]);
    if (side === "cloud" && known(list, "pending") !== null) facts.push(["waiting or running", `${known(list, "pending")} on ${plural(known(list, "workers"), "worker")}`, ""]);
    const age = list.length ? now - last(list).at : 0;
    if (age > OLD) facts.push(["heard", `${age.toFixed(0)} s ago`, side === "cloud" ? "answers bring it, and none came" : ""]);
    if (!facts.length) facts.push(["", "nothing heard yet", ""]);
    box.querySelector("dl").replaceChildren(...facts.flatMap(([name, value, why]) => {
      const shown = make("dd", value);
      if (why) shown.append(make("small", why));
      return [make("dt", name), shown];
    }));
  }
}
function observed() {
  const found = state.observed;
  if (!found) return put("seen-of", "No observer looks. --observe activation,attention,debug lets some.");
  if (found === seen) return;
  seen = found;
  put("seen-of", `Of request ${found.number}, cut ${found.cut}.`);
  const parts = [];
  for (const { title, headers, rows, notes } of found.tables) {
    const box = make("div", null, { class: "wide", tabindex: "0", role: "region", "aria-label": `What ${title} saw` });
    const shown = make("table"), head = make("thead"), body = make("tbody"), names = make("tr");
    headers.forEach((text, column) => names.append(make("th", text, { scope: "col", class: column < 2 ? "text" : "" })));
    head.append(names);
    for (const cells of rows) {
      const row = make("tr");
      cells.forEach((text, column) => row.append(column === 1 ? make("th", tail(text, 48), { scope: "row", title: text }) : make("td", text, { class: column === 0 ? "text" : "" })));
      body.append(row);
    }
    shown.append(head, body);
    if (rows.length) box.append(shown);
    parts.push(make("h3", title), ...(rows.length ? [box] : []), ...notes.map((text) => make("p", text)));
  }
  if (found.pictures.length) {
    const maps = make("div", null, { class: "maps" });
    for (const { side, name, png } of found.pictures) {
      const figure = make("figure");
      figure.append(make("img", null, { src: `data:image/png;base64,${png}`, alt: `attention of ${name}, on the ${side}: queries down, keys to the right` }), make("figcaption", `${side} ${name}`));
      maps.append(figure);
    }
    parts.push(maps);
  }
  const scrolled = [...id("seen").querySelectorAll(".wide")].map((one) => one.scrollTop), focus = [...id("seen").querySelectorAll(".wide")].indexOf(document.activeElement);
  id("seen").replaceChildren(...parts);
  id("seen").querySelectorAll(".wide").forEach((one, index) => { one.scrollTop = scrolled[index] || 0; if (index === focus) one.focus({ preventScroll: true }); });
}

// -- hands

function pick(index) {
  const all = places.places;
  if (!all.length) return;
  picked = all[Math.min(all.length - 1, Math.max(0, index))].number;
  if (state) { const shown = state.requests.slice(-SHOWN); places = bars(id("stages"), shown, Object.keys(GROUPS), picked); chosen(shown); }
}
id("stages").addEventListener("keydown", (key) => {
  const at = places.places.findIndex((one) => one.number === picked), end = places.places.length - 1;
  const to = { ArrowLeft: at < 0 ? end : at - 1, ArrowRight: at < 0 ? end : at + 1, Home: 0, End: end }[key.key];
  if (to !== undefined) { pick(to); key.preventDefault(); }
  if (key.key === "Escape") { picked = null; later(); }
});
id("stages").addEventListener("pointermove", (event) => {
  const x = event.clientX - id("stages").getBoundingClientRect().left;
  const at = places.places.findIndex((one) => x >= one.x && x < one.x + places.step);
  if (at >= 0) pick(at);
});
id("stages").addEventListener("pointerleave", () => { picked = null; later(); });
id("pause").addEventListener("click", () => {
  paused = !paused;
  id("pause").setAttribute("aria-pressed", String(paused));
  put("pause", paused ? "Go on" : "Pause");
  later();
});
new ResizeObserver(later).observe(document.body);

// -- the stream

const stream = new EventSource("/events");
stream.addEventListener("whole", (event) => { heard = Date.now(); begin(JSON.parse(event.data)); });
stream.addEventListener("more", (event) => { heard = Date.now(); more(JSON.parse(event.data)); });
stream.addEventListener("ended", () => { ended = true; stream.close(); show("ended", "ended"); later(); });
stream.addEventListener("error", () => { if (!ended) show("waiting", stream.readyState === EventSource.CLOSED ? "not connected: load the page again" : "connecting again"); });
setInterval(() => {
  if (ended || !state || stream.readyState !== EventSource.OPEN) return;
  const silent = Math.round((Date.now() - heard) / 1000);
  show(silent > 5 ? "waiting" : "live", silent > 5 ? `no news for ${silent} s` : "live");
  if (!silent) later();
}, 1000);
