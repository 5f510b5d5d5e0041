// What upstreams are used for: requests and tokens by model, profile and key, as `GET /metrics` counts them.

import { send } from "./api.js";
import { h, keyed, text, chip, number } from "./dom.js";

/** Most rows that are shown: those with the most tokens. */
const ROWS = 100;
const READ_MS = 5000;

const SAMPLE = /^steersman_upstream_(\w+)\{(.*)\} (\S+)$/gm;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

const BREAKERS = { closed: "answer", open: "failed", trial: "prefill" };

/** The samples about upstreams: `{name, labels, value}`. */
export function samples(metrics) {
  const unescaped = (value) => value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
  return [...metrics.matchAll(SAMPLE)].map(([, name, labels, value]) => ({
    name,
    labels: Object.fromEntries([...labels.matchAll(LABEL)].map(([, label, quoted]) => [label, unescaped(quoted)])),
    value: Number(value),
  }));
}

/** The element of `map` under `key`, which `make` makes if there is none. */
function entry(map, key, make) {
  if (!map.has(key)) map.set(key, make());
  return map.get(key);
}

/** What samples say of each upstream, and of each model, profile and key of it, those with the most tokens first. */
export function use(all) {
  const [upstreams, rows] = [new Map(), new Map()];
  for (const { name, labels, value } of all) {
    const { upstream, model, profile, key, kind, state } = labels;
    const one = entry(upstreams, upstream, () => ({ name: upstream, breaker: "", running: 0, waiting: 0, today: 0 }));
    if (name === "breaker" && value === 1) one.breaker = state;
    if (name === "requests_now") one[state] = value;
    if (name === "tokens_today") one.today = value;
    if (model === undefined) continue;
    const row = entry(rows, JSON.stringify([upstream, model, profile, key]), () => ({
      upstream, model, profile, key, requests: 0, failures: 0, prompt: 0, cached: 0, reply: 0, reply_estimated: 0,
    }));
    if (name === "requests_total") row.requests = value;
    if (name === "failures_total") row.failures = value;
    if (name === "tokens_total") row[kind] = value;
  }
  const tokens = ([, row]) => row.prompt + row.reply + row.reply_estimated;
  return {
    upstreams: [...upstreams.values()],
    rows: [...rows].sort((a, b) => tokens(b) - tokens(a)).map(([id, row]) => ({ id, ...row })),
  };
}

const COLUMNS = [
  ["Upstream", ({ upstream }) => upstream],
  ["Model", ({ model }) => model],
  ["Profile", ({ profile }) => profile],
  ["Key", ({ key }) => key || "none"],
  ["Requests", ({ requests, failures }) => `${number(requests)}${failures ? `, ${number(failures)} failed` : ""}`],
  ["Prompt tokens", ({ prompt, cached }) => `${number(prompt)}${cached ? `, ${number(cached)} from its cache` : ""}`],
  ["Reply tokens", ({ reply, reply_estimated: cut }) => `${number(reply)}${cut ? `, and about ${number(cut)} of replies that were cut off` : ""}`],
];

/**
 * The section about upstreams, which is hidden while there are none. `draw(isServed, signal)` reads and shows what they
 * were used for, at most every five seconds.
 */
export function upstreams() {
  const now = h("ul", { class: "plain" });
  const body = h("tbody");
  const head = COLUMNS.map(([name]) => h("th", { scope: "col" }, name));
  const table = h("div", { class: "scroll" },
    h("table", { class: "upstreams-table" }, h("caption", { class: "sr" }, "Use of upstreams"), h("thead", {}, h("tr", {}, head)), body));
  const none = h("p", { class: "muted" }, "No request was sent to an upstream since the server started.");
  const more = h("p", { class: "muted small" });
  const element = h("section", { "aria-labelledby": "upstreams-title", hidden: true },
    h("h2", { id: "upstreams-title" }, "Upstreams"),
    h("p", { class: "muted" }, "What other servers computed, by model, profile and key, since this server started. A key is shown by the digits that policies and metrics have of it."),
    now, none, table, more);
  const row = () => h("tr", {}, COLUMNS.map(([name]) => h("td", { "data-label": name, class: name === "Key" ? "mono" : null })));
  let last = -Infinity;

  async function draw(isServed, signal) {
    element.hidden = !isServed;
    if (!isServed || performance.now() - last < READ_MS) return;
    last = performance.now();
    const { upstreams: all, rows } = use(samples(await (await send("/metrics", { signal })).text()));
    keyed(now, all, ({ name }) => name, () => h("li", { class: "row" }, h("span", { class: "strong wrap" }), h("span")), (line, one) => {
      const [name, state] = line.children;
      text(name, one.name);
      const words = `${number(one.running)} running, ${number(one.waiting)} waiting, ${number(one.today)} tokens today`;
      if (state.dataset.shown === one.breaker + words) return;
      state.dataset.shown = one.breaker + words;
      state.replaceChildren(h("span", { class: "muted small" }, `${words} `), one.breaker === "closed" ? "" : chip(one.breaker, BREAKERS[one.breaker]));
    });
    keyed(body, rows.slice(0, ROWS), ({ id }) => id, row, (line, one) => COLUMNS.forEach(([, of], i) => text(line.children[i], of(one))));
    table.hidden = rows.length === 0;
    none.hidden = rows.length > 0;
    text(more, rows.length > ROWS ? `${number(rows.length - ROWS)} more with fewer tokens are in GET /metrics.` : "");
  }
  return { element, draw };
}
