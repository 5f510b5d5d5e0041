// The newest lines of the server's log, for operators.

import { getLines } from "./api.js";
import { h, text, title, count, empty, notice } from "./dom.js";
import { poll } from "./requests.js";
import { tab } from "./storage.js";

/** Lines that are shown; the server keeps as many. */
const LINES = 2000;
const LEVELS = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];
/** Pixels within which the list is at its end. */
const NEAR_END = 8;
/** Pages that are read in one turn. */
const PAGES = 8;

export function log(element, state) {
  element.append(title("Log", "What the server writes to stderr: the newest 2,000 lines, at most 1 MiB."));
  if (!state.isOperator) {
    element.append(notice("info", h("p", {}, "The log is shown to an operator's key.")));
    return () => {};
  }
  const level = h(
    "select",
    { id: "log-level" },
    LEVELS.map((name) => h("option", { value: name }, name === "ERROR" ? "Errors only" : `${name} and above`)),
  );
  const filter = h("input", { id: "log-filter", type: "search", placeholder: "text", autocomplete: "off", spellcheck: "false" });
  const follow = h("input", { id: "log-follow", type: "checkbox", checked: true });
  level.value = tab.get("log-level") ?? "TRACE";
  filter.value = tab.get("log-filter") ?? "";
  const list = h("div", { class: "log-lines", role: "log", "aria-live": "off", "aria-label": "Lines of the log", tabindex: "0" });
  const none = empty("No line", "No line of the log has this level and text.");
  const foot = h("p", { class: "muted small", role: "status" });
  element.append(
    h(
      "div",
      { class: "log-tools" },
      h("div", { class: "field" }, h("label", { for: "log-level" }, "Level"), level),
      h("div", { class: "field grow" }, h("label", { for: "log-filter" }, "Lines with"), filter),
      h("div", { class: "check" }, follow, h("label", { for: "log-follow" }, "Follow")),
    ),
    none,
    list,
    foot,
  );

  let lines = [];
  /** Number of the newest line. */
  let last = 0;
  const matches = (line) =>
    LEVELS.indexOf(line.level) <= LEVELS.indexOf(level.value) &&
    line.line.toLowerCase().includes(filter.value.trim().toLowerCase());
  const make = (line) => h("p", { class: `log-line ${line.level.toLowerCase()}` }, line.line);

  /** Shows all lines anew, or only `added`. */
  function draw(added = null) {
    const isNew = added === null;
    const found = (added ?? lines).filter(matches);
    if (isNew) list.replaceChildren(...found.map(make));
    else list.append(...found.map(make));
    while (list.childElementCount > LINES) list.firstElementChild.remove();
    none.hidden = list.childElementCount > 0;
    list.hidden = list.childElementCount === 0;
    const shown = list.childElementCount;
    text(foot, shown === lines.length ? count(shown, "line") : `${shown} of ${count(lines.length, "line")}`);
    if (follow.checked) list.scrollTop = list.scrollHeight;
  }

  /** What is said where lines are missing before `line`. */
  function gap(line) {
    if (last === 0 || line.number === last + 1) return [];
    return [{ number: line.number, level: "WARN", line: "… lines between are no longer kept, or the server was started again" }];
  }

  level.addEventListener("change", () => {
    tab.set("log-level", level.value);
    draw();
  });
  filter.addEventListener("input", () => {
    tab.set("log-filter", filter.value);
    draw();
  });
  follow.addEventListener("change", () => follow.checked && draw([]));
  // Who scrolls back reads, and is not carried away: with a wheel, a finger, a key or the bar.
  list.addEventListener("scroll", () => {
    if (list.scrollHeight - list.scrollTop - list.clientHeight > NEAR_END) follow.checked = false;
  }, { passive: true });

  draw();
  return poll(async (signal) => {
    for (let page = 0; page < PAGES; page += 1) {
      const read = await getLines(`/v1/log?after=${last}`, signal);
      if (read.length === 0) return;
      const added = [...gap(read[0]), ...read];
      last = read.at(-1).number;
      lines = [...lines, ...added].slice(-LINES);
      draw(added);
    }
  }, 1000);
}
