// -- a figure: a chart that can be saved, its numbers as a table, redrawn when its width changes or it is printed ----
const PAPER = 700; // pixels of an A4 page between its margins (chart.css and @page agree), less a little
const SAVED = 960;
const figures = [];
let printing = false;

const save = (name, kind, text) => {
  const link = html("a", document.body);
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  link.href = address;
  link.download = name;
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
};
const cell = (value) => {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value); // a spreadsheet would take it for a formula
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
};
const csv = ({ headers, rows }) => [headers, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

const light = () => { // the colours of a saved chart: those of the page by day
  const rule = document.getElementById("page-style").sheet.cssRules[0];
  return (text) => text.replace(/var\(--([a-z-]+)\)/g, (_, name) => rule.style.getPropertyValue(`--${name}`).trim());
};
const standalone = (title, legend, charts) => {
  const resolved = light();
  const outer = draw("svg", null, { xmlns: "http://www.w3.org/2000/svg" });
  draw("title", outer, {}, title);
  draw("style", outer, {}, resolved(find("#chart-style").textContent));
  const ground = draw("rect", outer, { x: 0, y: 0, style: `fill:${resolved("var(--paper)")}` });
  draw("text", outer, { x: 12, y: 24, class: "head", style: "font-size:15px" }, title);
  let x = 12, y = 46;
  for (const [name, label] of legend) {
    const length = wide(label) + 34;
    if (x + length > SAVED) [x, y] = [12, y + 18];
    draw("rect", outer, { x, y: y - 10, width: name === "tick" ? 4 : 12, height: 12, style: `fill:${color(name === "tick" ? "ink" : name)}` });
    draw("text", outer, { x: x + 18, y }, label);
    x += length;
  }
  let top = legend.length ? y + 14 : 36;
  for (const chart of charts) {
    const place = draw("g", outer, { transform: `translate(12 ${top})` });
    place.append(...chart.childNodes);
    top += Number(chart.getAttribute("height")) + 12;
  }
  const across = Math.max(...charts.map((one) => Number(one.getAttribute("width")))) + 24;
  for (const [name, value] of [["width", across], ["height", top], ["viewBox", `0 0 ${across} ${top}`]]) outer.setAttribute(name, value);
  ground.setAttribute("width", across);
  ground.setAttribute("height", top);
  for (const one of outer.querySelectorAll("[tabindex], [role]")) for (const name of ["tabindex", "role", "aria-expanded"]) one.removeAttribute(name);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${resolved(new XMLSerializer().serializeToString(outer))}\n`;
};

const tabled = (box, label, { headers, rows }) => {
  const made = html("table", box);
  html("caption", made, "", label);
  const top = html("tr", html("thead", made));
  for (const header of headers) html("th", top, "", header).setAttribute("scope", "col");
  const body = html("tbody", made);
  for (const row of rows) {
    const line = html("tr", body);
    row.forEach((value, index) => {
      const text = value === null || value === undefined ? "" : typeof value === "number" ? even(value.toPrecision(6)) : value;
      const one = html(index ? "td" : "th", line, typeof value === "string" && index ? "text" : "", text);
      if (index) one.dataset.label = headers[index];
      else one.setAttribute("scope", "row");
    });
  }
};

/* `paint(width, paper)` gives the SVGs, at best one; `numbers()` the headers and rows behind them; `table` is false
   where these are too many to be read; `none` is said where there is nothing to draw. */
const figure = (selector, { name, title, legend = [], paint, numbers, table = true, none = null, controls = null }) => {
  const box = find(selector);
  if (!box) return null;
  if (none !== null) {
    html("p", box, "empty", none);
    return null;
  }
  if (controls) controls(html("div", box, "controls"));
  const signs = legend.length ? html("ul", box, "legend") : null;
  for (const [key, label] of legend) {
    const one = html("li", signs);
    const sign = html("i", one, key === "tick" ? "tick" : "");
    if (key !== "tick") sign.style.background = color(key);
    one.append(label);
  }
  const chart = html("div", box, "chart");
  chart.setAttribute("role", "group");
  chart.setAttribute("aria-label", `${title}; arrow keys go from mark to mark`);
  const tools = html("div", box, "tools");
  const file = `${data.file}-${name}`;
  for (const [kind, does] of [
    ["SVG", () => save(`${file}.svg`, "image/svg+xml", standalone(title, legend, paint(SAVED, false)))],
    ["CSV", () => save(`${file}.csv`, "text/csv", csv(numbers()))],
  ]) {
    const button = html("button", tools, "", `Save ${kind}`);
    button.type = "button";
    button.dataset.save = kind.toLowerCase();
    button.setAttribute("aria-label", `Save ${kind}: ${title}`);
    button.addEventListener("click", does);
  }
  if (table) {
    const behind = html("details", tools, "behind");
    html("summary", behind, "", "The numbers as a table");
    const inside = html("div", behind);
    behind.addEventListener("toggle", () => {
      inside.replaceChildren();
      if (behind.open) tabled(inside, title, numbers());
    });
  }
  let drawn = 0;
  const again = (force) => {
    const width = printing ? PAPER : Math.floor(chart.clientWidth);
    if (!width || (width === drawn && force !== true)) return;
    const kept = document.activeElement && chart.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    drawn = width;
    hide();
    chart.replaceChildren(...paint(width, printing));
    reachable(chart);
    const same = kept === undefined ? null : [...chart.querySelectorAll("[data-key]")].find((one) => one.dataset.key === kept);
    if (same) same.focus();
  };
  new ResizeObserver(() => printing || again()).observe(chart);
  figures.push(again);
  again();
  return () => again(true);
};
const repaint = () => figures.forEach((again) => again(true));

// -- on paper: another width, and nothing folded away -----------------------------------------------------------------
let folded = [];
const paper = (now) => {
  if (now === printing) return;
  printing = now;
  if (now) {
    folded = [...document.querySelectorAll("details:not(.behind):not([open])")];
    folded.forEach((one) => (one.open = true));
  } else {
    folded.forEach((one) => (one.open = false));
  }
  repaint();
};
addEventListener("beforeprint", () => paper(true));
addEventListener("afterprint", () => paper(false));
matchMedia("print").addEventListener("change", (event) => paper(event.matches));
