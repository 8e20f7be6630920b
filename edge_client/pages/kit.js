// -- numbers for people -------------------------------------------------------------------------------------------
const short = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));
const even = (text) => text.replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, ""); // of ticks: "2.00 ms" -> "2 ms"
const scaled = (value, units) => {
  let [factor, unit] = units[0];
  for (const [size, name] of units) if (Math.abs(value) >= size) [factor, unit] = [size, name];
  return value === 0 ? `0 ${unit}` : `${short(value / factor)} ${unit}`;
};
const time = (ns) => scaled(ns, [[1e3, "µs"], [1e6, "ms"], [1e9, "s"]]);
const bytes = (n) => (n < 1024 ? `${Math.round(n)} B` : scaled(n, [[1024, "KiB"], [1024 ** 2, "MiB"], [1024 ** 3, "GiB"]]));
const joules = (j) => scaled(j, [[1e-6, "µJ"], [1e-3, "mJ"], [1, "J"]]);
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

// -- elements: text is only ever set as text ----------------------------------------------------------------------
const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector) => document.querySelector(selector);
const html = (tag, parent, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
};
const draw = (tag, parent, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
};
const canvas = (width, height) => Object.assign(document.createElement("canvas"), { width, height });
const svg = (width, height) => draw("svg", null, { width, height, viewBox: `0 0 ${width} ${height}` });
const color = (name) => (name.startsWith("#") ? name : `var(--${name})`);
const ruler = canvas(1, 1).getContext("2d");
const wide = (text, bold) => {
  ruler.font = `${bold ? "700 " : ""}12px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
};
const fit = (text, width, bold) => { // names differ at their ends: a long one is shortened in the middle
  if (wide(text, bold) <= width) return text;
  let keep = Math.max(2, Math.floor((text.length * width) / wide(text, bold)));
  const cut = () => `${keep > 24 ? text.slice(0, 6) : ""}…${text.slice(text.length - (keep > 24 ? keep - 6 : keep)).replace(/^\./, "")}`;
  while (keep > 2 && wide(cut(), bold) > width) keep -= 1;
  return cut();
};

// -- what a mark tells: by the pointer, and by the keyboard --------------------------------------------------------
const tip = find("#tip");
const tips = new WeakMap(); // element -> {title, lines: [[label, value]]}
let lit = null;
const tell = (element, title, lines, role) => {
  tips.set(element, { title, lines });
  element.setAttribute("role", role || "img");
  element.setAttribute("aria-label", `${title}. ${lines.map(([label, value]) => `${label}: ${value}`).join("; ")}`);
  element.setAttribute("tabindex", "-1");
};
const hide = () => {
  tip.hidden = true;
  if (lit) lit.classList.remove("on");
  lit = null;
};
const teller = (target) => {
  let element = target instanceof Element ? target : null;
  while (element && !tips.has(element)) element = element.parentElement;
  return element;
};
const show = (element, x, y) => {
  if (element !== lit) {
    hide();
    lit = element;
    lit.classList.add("on");
    const { title, lines } = tips.get(element);
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
  const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${y + 18 + height < innerHeight ? y + 18 : Math.max(8, y - height - 14)}px`;
};
const pointed = (event) => {
  const element = teller(event.target);
  if (element) show(element, event.clientX, event.clientY);
  else hide();
};
document.addEventListener("pointermove", pointed);
document.addEventListener("pointerdown", pointed);
document.addEventListener("scroll", hide, { capture: true, passive: true });
document.documentElement.addEventListener("pointerleave", hide);
document.addEventListener("focusin", (event) => {
  const element = teller(event.target);
  if (!element || !element.matches(":focus-visible")) return hide();
  requestAnimationFrame(() => { // after the browser has scrolled it into sight
    if (document.activeElement !== element) return;
    const box = element.getBoundingClientRect();
    show(element, box.left + Math.min(box.width / 2, 120), Math.min(box.bottom, innerHeight) - 8);
  });
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return hide();
  const at = event.target instanceof Element ? event.target : null;
  const box = at && tips.has(at) ? at.closest(".chart") : null;
  if (!box) return undefined;
  const all = [...box.querySelectorAll("[tabindex]")].filter((one) => tips.has(one));
  const place = all.indexOf(at);
  const next = { ArrowDown: place + 1, ArrowRight: place + 1, ArrowUp: place - 1, ArrowLeft: place - 1, Home: 0, End: all.length - 1 }[event.key];
  if (next !== undefined) {
    event.preventDefault();
    const one = all[Math.min(all.length - 1, Math.max(0, next))];
    at.setAttribute("tabindex", "-1");
    one.setAttribute("tabindex", "0");
    one.focus();
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    at.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  }
  return undefined;
});
const reachable = (box) => { // one stop of the Tab key a chart; the arrows go on from there
  const all = [...box.querySelectorAll("[tabindex]")].filter((one) => tips.has(one));
  if (all.length) all[0].setAttribute("tabindex", "0");
};

// -- choices: buttons that stay pressed -----------------------------------------------------------------------------
const choice = (parent, what, entries, now, chosen) => {
  const group = html("div", parent);
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", what);
  html("span", group, "what", `${what}:`).setAttribute("aria-hidden", "true");
  const buttons = entries.map(([key, label]) => {
    const one = html("button", group, "", label);
    one.type = "button";
    one.dataset.key = key;
    one.addEventListener("click", () => chosen(key));
    return one;
  });
  const press = (key) => buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.key === key)));
  press(now);
  return press;
};
