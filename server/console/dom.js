// Elements, numbers and small widgets. Text of models enters the page as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: attributes, `on…` listeners, `class`, and properties of the object for `value` and `checked`. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  set(element, props);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An element of SVG. */
export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  set(element, props);
  element.append(...children);
  return element;
}

function set(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (name === "width" && element instanceof HTMLElement) element.style.width = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
}

/** Shows `items` in `parent`: an element each, found again by key, so that focus stays where it is. */
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(keyOf(item));
    const child = old.get(name) ?? create(item);
    child.dataset.key = name;
    old.delete(name);
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  old.forEach((child) => child.remove());
}

/** Sets the text if it differs: a screen reader is not told twice. */
export function text(element, value) {
  if (element.textContent !== String(value)) element.textContent = value;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

export const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));

/** 1 call, 2 calls */
export const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

/** Numbers of a configuration, which the engine has in 32 bits. */
export const rounded = (value) => String(Math.round(value * 1e4) / 1e4);

/** 19.1 M */
export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return String(value);
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min ${Math.floor((ms % 60_000) / 1000)} s`;
  return `${Math.floor(ms / 3_600_000)} h ${Math.floor((ms % 3_600_000) / 60_000)} min`;
}

/** `12:04:31`, with the day if it is not today. */
export function time(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  const clock = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? clock : `${date.toLocaleDateString("en-CA")} ${clock}`;
}

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

export const chip = (label, kind = label) => h("span", { class: `chip ${kind.replaceAll(" ", "-")}` }, label);

export const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];

/** A heading of a view. It gets the focus when the view opens. */
export const title = (name, about, ...tools) =>
  h("div", { class: "title" }, h("div", {}, h("h1", { tabindex: "-1" }, name), h("p", { class: "muted" }, about)), ...tools);

export const empty = (heading, hint) => h("div", { class: "empty" }, h("p", { class: "strong" }, heading), h("p", { class: "muted" }, hint));

export const notice = (kind, ...content) => h("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : null }, ...content);

/** A bar with parts `{name, value, kind}` of `whole`. */
export function bar(label, parts, whole) {
  const shown = parts.filter((part) => part.value > 0);
  const words = shown.map((part) => `${part.name} ${part.text ?? part.value}`).join(", ");
  return h("div", { class: "meter", role: "img", "aria-label": `${label}: ${words || "nothing"}` },
    shown.map((part) => h("span", { class: `part ${part.kind}`, width: `${(100 * part.value) / Math.max(whole, 1)}%` })));
}

/** Puts a text on the clipboard; returns whether it is there. Pages without TLS on other hosts have the old way only. */
async function copy(value) {
  try {
    await navigator.clipboard.writeText(value);
    return true;
  } catch {
    const area = h("textarea", { class: "sr", value, "aria-hidden": "true", tabindex: "-1" });
    document.body.append(area);
    const focused = document.activeElement;
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isCopied;
  }
}

/** A button that copies what `read` returns; `what` tells a screen reader which text that is. */
export function copyButton(read, what) {
  const label = h("span", {}, "Copy");
  return h("button", { type: "button", class: "quiet copy", onclick: async () => {
    text(label, await copy(read()) ? "Copied" : "Not copied");
    setTimeout(() => text(label, "Copy"), 2000);
  } }, label, h("span", { class: "sr" }, ` ${what}`));
}

/** A block of code with a button that copies it. */
export const code = (name, source) =>
  h("div", { class: "code" }, h("p", { class: "muted small row" }, name || "Code", copyButton(() => source, "the code")),
    h("pre", { tabindex: "0", "aria-label": name ? `Code: ${name}` : "Code" }, h("code", {}, source)));

/** A message that goes away. */
export function toast(message, kind = "good") {
  const note = h("div", { class: `toast ${kind}` }, message);
  document.querySelector("#toasts").append(note);
  setTimeout(() => note.remove(), 6000);
}

/** Asks before something is done. */
export function confirm(heading, question, yes) {
  const dialog = document.querySelector("#confirm-dialog");
  dialog.querySelector("#confirm-title").textContent = heading;
  dialog.querySelector("#confirm-text").textContent = question;
  dialog.querySelector("#confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
  });
}
