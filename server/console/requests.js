// The requests that run and wait, and the newest ones that have ended.

import { get } from "./api.js";
import { chart, samples } from "./charts.js";
import { h, svg, keyed, text, title, chip, number, duration, bytes, percent, time, bar, empty, notice } from "./dom.js";

const ENDED = ["finished", "failed", "cancelled"];
const POINTS = 90;
/** Characters of a search, each of at most three bytes: the server takes 256. */
const SEARCH = 80;

/** Repeats `work` every `ms` while the page is visible; returns how to stop. */
export function poll(work, ms) {
  const abort = new AbortController();
  let timer;
  const turn = async () => {
    try {
      if (!document.hidden) await work(abort.signal);
    } catch (error) {
      if (abort.signal.aborted) return;
      if (error.status !== 0 && error.status !== 503) throw error;
    } finally {
      if (!abort.signal.aborted) timer = setTimeout(turn, ms);
    }
  };
  turn();
  return () => {
    abort.abort();
    clearTimeout(timer);
  };
}

const tile = (name, id) => h("div", { class: "tile" }, h("p", { class: "label" }, name), h("p", { class: "figure", id }, "–"), h("p", { class: "muted small", id: `${id}-more` }));

/** The parts of a prompt: from the cache, computed, and still to come. */
export function promptBar(request) {
  const { prompt_tokens: all, cached_tokens: cached, prefilled_tokens: done } = request;
  const ended = ENDED.includes(request.phase);
  const computed = Math.max((ended ? all : done) - cached, 0);
  return bar("Prompt", [
    { name: "from the cache", value: cached, kind: "cached" },
    { name: "computed", value: computed, kind: "computed" },
    { name: "to come", value: Math.max(all - cached - computed, 0), kind: "left" },
  ], all);
}

function row(request) {
  const cells = ["phase", "what", "profile", "prompt", "reply", "rate", "time"].map((name) => h("td", { class: name }));
  cells[0].dataset.label = "State";
  cells[1].dataset.label = "Request";
  cells[2].dataset.label = "Profile, model";
  cells[3].dataset.label = "Prompt";
  cells[4].dataset.label = "Reply";
  cells[5].dataset.label = "Tokens/s";
  cells[6].dataset.label = "Time";
  // The link is for keyboards; a click beside it opens the same.
  const open = (event) => !event.target.closest("a") && getSelection().isCollapsed && cells[1].querySelector("a")?.click();
  return h("tr", { onclick: open }, cells);
}

function fill(line, request) {
  const [phase, what, profile, prompt, reply, rate, when] = line.children;
  const label = request.phase === "failed" ? `failed ${request.status}` : request.phase;
  const state = `${label} ${request.policy_failed}`;
  if (phase.dataset.shown !== state) {
    phase.dataset.shown = state;
    phase.replaceChildren(chip(label, request.phase), ...(request.policy_failed ? [chip("policy failed", "failed")] : []));
  }
  const { route } = request;
  if (!what.firstChild) {
    const name = request.id
      ? h("a", { href: `#/requests/${encodeURIComponent(request.id)}`, title: request.id }, request.id.slice(0, 18))
      : h("span", {}, `No. ${request.number}`);
    line.classList.toggle("opens", Boolean(request.id));
    what.append(name, h("span", { class: "muted small" }, request.stream ? `${route}, stream` : route));
  }
  const model = `${request.profile ?? "–"} ${request.model ?? ""}`;
  if (profile.dataset.shown !== model) {
    profile.dataset.shown = model;
    profile.replaceChildren(h("span", {}, request.profile ?? "–"), h("span", { class: "muted small" }, request.model ?? ""));
  }
  const size = `${request.prompt_tokens} ${request.cached_tokens} ${request.prefilled_tokens} ${request.phase}`;
  if (prompt.dataset.shown !== size) {
    prompt.dataset.shown = size;
    prompt.replaceChildren(...(request.prompt_tokens
      ? [h("span", {}, number(request.prompt_tokens)), h("span", { class: "muted small" }, `${percent(request.cached_tokens, request.prompt_tokens)} cached`), promptBar(request)]
      : ["–"]));
  }
  text(reply, request.reply_tokens ? number(request.reply_tokens) : "–");
  text(rate, request.tokens_per_second ? request.tokens_per_second.toFixed(1) : "–");
  text(when, duration(request.elapsed_ms));
  when.title = `Arrived at ${time(request.arrived)}`;
}

function table(caption) {
  const body = h("tbody");
  const head = ["State", "Request", "Profile, model", "Prompt", "Reply", "Tokens/s", "Time"].map((name) => h("th", { scope: "col" }, name));
  return [h("div", { class: "scroll" }, h("table", { class: "requests-table" }, h("caption", { class: "sr" }, caption), h("thead", {}, h("tr", {}, head)), body)), body];
}

function sparkline() {
  const line = svg("polyline", { points: "" });
  const area = svg("polygon", { points: "" });
  const picture = svg("svg", { viewBox: `0 0 ${POINTS - 1} 24`, preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" }, area, line);
  const values = [];
  return [picture, (value) => {
    values.push(value);
    if (values.length > POINTS) values.shift();
    const most = Math.max(...values, 1);
    const points = values.map((v, i) => `${POINTS - values.length + i},${(23 - (21 * v) / most).toFixed(1)}`);
    line.setAttribute("points", points.join(" "));
    area.setAttribute("points", `${POINTS - values.length},24 ${points.join(" ")} ${POINTS - 1},24`);
  }];
}

/** What is drawn over time: a name, how a value is written, and the value of a sample. */
const OVER_TIME = [
  ["Tokens per second", (value) => value.toFixed(1), (sample) => sample.tokens_per_second],
  ["Requests per minute", (value) => value.toFixed(1), ({ requests, seconds }) => (60 * requests) / Math.max(seconds, 1)],
  ["First token", duration, (sample) => sample.first_token_ms],
  ["Waiting requests", number, (sample) => sample.waiting],
  ["Memory", bytes, (sample) => sample.memory_bytes],
];

/** Charts of what the server did in the last two hours. */
function charts() {
  const all = OVER_TIME.map(([name, format, value]) => ({ value, ...chart(name, format) }));
  const element = h("section", { "aria-labelledby": "charts-title", hidden: true }, h("h2", { id: "charts-title" }, "Over time"), h("div", { class: "charts" }, all.map((one) => one.element)));
  /** `taken`: the samples of the server. */
  function draw(taken) {
    element.hidden = taken.length === 0;
    if (element.hidden) return;
    const [from, to] = [taken[0].at - taken[0].seconds, taken.at(-1).at];
    for (const { value, draw: show } of all) {
      show(taken.map((sample) => ({ at: sample.at, value: value(sample) })).filter((point) => point.value !== null), from, to);
    }
  }
  return { element, draw };
}

/** Accounts of memory: the field of an engine's `bytes`, its name, and its color. */
export const ACCOUNTS = [
  ["weights", "Weights", "weights"],
  ["running", "Running requests", "running"],
  ["prefix_cache", "Prefix cache", "cache"],
  ["step", "Next step", "step"],
];

/** Bytes of all arrays of the process. They are counted after the first pass, accounts from the start. */
export function usedBytes(engines) {
  const known = engines.flatMap(({ bytes }) => ACCOUNTS.map(([field]) => bytes[field] ?? 0));
  return Math.max(engines[0]?.bytes.arrays ?? 0, known.reduce((sum, bytes) => sum + bytes, 0));
}

export function requests(element, state) {
  const [active, activeBody] = table("Requests that run or wait");
  const [ended, endedBody] = table("Requests that have ended");
  const [spark, push] = sparkline();
  const idle = empty("No requests are running", "Requests appear here as soon as clients send them.");
  const none = empty("No request yet", "Send one from the chat, or with any client of OpenAI's, Anthropic's or Ollama's API.");
  const nothing = empty("Nothing found", state.isOperator ? "No request has this text in its id, route, model, profile, end or notes." : "No request has this text in its route, model, profile or end.");
  const search = h("input", { id: "search", type: "search", placeholder: state.isOperator ? "id, model, profile, note" : "model, profile", maxlength: SEARCH, autocomplete: "off", spellcheck: "false" });
  const hint = !state.isOperator && notice("info", h("p", {}, state.access.operators
    ? "This key sees numbers. An operator's key also opens each request: its text as it streams, and every policy decision."
    : "An operator opens each request: its text as it streams, and every policy decision. Create a key with: steersman keys create me --operator"));
  const overTime = charts();
  const rate = tile("Tokens per second", "rate");
  rate.append(spark);
  element.append(
    title("Requests", "What the server does now, and what it did last."),
    h("div", { class: "tiles" }, tile("Running", "running"), tile("Waiting", "waiting"), rate, tile("Prompts from the cache", "cached"), tile("Memory", "memory")),
    ...(hint ? [hint] : []),
    h("section", {}, h("h2", {}, "Now"), idle, active),
    overTime.element,
    h("section", {}, h("div", { class: "row" }, h("h2", {}, "Recent requests"), h("div", { class: "search" }, h("label", { for: "search" }, "Search"), search)), none, nothing, ended),
  );
  const put = (id, value, more) => {
    text(element.querySelector(`#${id}`), value);
    text(element.querySelector(`#${id}-more`), more);
  };
  async function turn(signal) {
    const wanted = search.value.trim();
    const path = wanted ? `/v1/requests?search=${encodeURIComponent(wanted)}` : "/v1/requests";
    const [{ requests: all }, health, { counts }, taken] = await Promise.all([get(path, signal), get("/health", signal), get("/v1/cache", signal), samples.newest((path) => get(path, signal))]);
    // What was asked for before the text changed is old.
    if (wanted !== search.value.trim()) return;
    const isEnded = (request) => ENDED.includes(request.phase);
    const [now, past] = [all.filter((r) => !isEnded(r)), all.filter(isEnded)];
    // A server that was started again counts from 1.
    const keyOf = ({ number: place, arrived }) => `${place} ${arrived}`;
    keyed(activeBody, now, keyOf, row, fill);
    keyed(endedBody, past, keyOf, row, fill);
    active.hidden = now.length === 0;
    idle.hidden = now.length > 0;
    ended.hidden = past.length === 0;
    none.hidden = past.length > 0 || wanted !== "";
    nothing.hidden = past.length > 0 || wanted === "";
    const sum = (field) => health.engines.reduce((total, engine) => total + engine[field], 0);
    const [running, waiting, speed] = [sum("running"), health.waiting, sum("tokens_per_second")];
    const held = [
      [sum("awaiting_policy"), "waiting for a policy"],
      [sum("awaiting_prefix"), "waiting for a prefix"],
      [sum("preempted"), "preempted"],
    ].filter(([count]) => count > 0);
    put("running", number(running), held.map(([count, what]) => `${number(count)} ${what}`).join(", ") || (running ? "none is paused" : "the server is idle"));
    put("waiting", number(waiting), waiting ? "for a place" : "the queue is empty");
    put("rate", speed.toFixed(speed < 100 ? 1 : 0), "in the last 10 s");
    push(speed);
    overTime.draw(taken);
    put("cached", percent(counts.cached_tokens, counts.prompt_tokens), `${number(counts.hits)} of ${number(counts.hits + counts.misses)} requests`);
    const [first] = health.engines;
    put("memory", bytes(usedBytes(health.engines)), first ? `of ${bytes(first.bytes.limit)}` : "no model is loaded");
  }
  const stop = poll(turn, 1000);
  // A search is answered at once, and not only by the next turn.
  let typed;
  const abort = new AbortController();
  search.addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => turn(abort.signal).catch(() => {}), 150);
  });
  return () => {
    clearTimeout(typed);
    abort.abort();
    stop();
  };
}
