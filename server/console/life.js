// One request's life: its prompt, its reply as it streams, and each policy decision at its token.

import { events, get } from "./api.js";
import { h, text, title, chip, fact, number, count, duration, percent, rounded, time, notice } from "./dom.js";
import { promptBar } from "./requests.js";

/** Records of a trace that are shown; a request may have 16,384. */
const SHOWN = 400;

/** What an answer of a policy does, in few words. */
export function summary(record) {
  const { hook, answer } = record;
  if (record.error) return `failed: ${record.error}`;
  if (answer === undefined || answer === null) return "no answer";
  if (hook === "on-step") return answer.map(action).join(", ") || "nothing";
  if (hook === "on-prompt") return answer.length ? `${count(answer.length, "replacement")} in the system text` : "nothing";
  if (hook === "on-request") {
    const plan = Object.entries(answer).filter(([, value]) => !isEmpty(value));
    return plan.map(([name, value]) => `${name.replaceAll("_", " ")}: ${brief(value)}`).join("; ") || "nothing";
  }
  return brief(answer);
}

const isEmpty = (value) => value === null || value === false || value === 0 || value === "" || (typeof value === "object" && Object.values(value).every(isEmpty));

function action(one) {
  if (typeof one === "string") return words(one);
  const [[name, value]] = Object.entries(one);
  return isEmpty(value) ? words(name) : `${words(name)} ${brief(value)}`;
}

const words = (name) => name.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();

function brief(value) {
  if (typeof value === "string") return value.length > 120 ? `“${value.slice(0, 120)}…”` : value;
  if (typeof value === "number") return rounded(value);
  if (typeof value !== "object" || value === null) return String(value);
  const entries = Object.entries(value).filter(([, inner]) => !isEmpty(inner));
  const shown = Array.isArray(value) ? value.map(brief) : entries.map(([name, inner]) => `${name.replaceAll("_", " ")} ${brief(inner)}`);
  const joined = shown.join(", ");
  return joined.length > 240 ? `${joined.slice(0, 240)}…` : joined;
}

/** The calls of policies in a request; those that changed nothing are counted. */
function decisions(records) {
  const matter = records.filter((record) => record.error || record.replaced || !["nothing", "no answer"].includes(summary(record)));
  const item = (record) => h("li", { class: record.shadow ? "shadow" : "" },
    h("p", {},
      h("span", { class: "strong" }, record.policy), " ", h("span", { class: "mono small" }, record.hook),
      record.step !== undefined ? h("span", { class: "muted small" }, ` at token ${number(record.input.reasoning_tokens + record.input.answer_tokens)}`) : null,
      record.shadow ? chip("shadow") : null, record.error ? chip("failed") : null, record.replaced ? chip("replaced", "failed") : null),
    h("p", {}, summary(record)),
    h("details", {}, h("summary", { class: "muted small" }, `${(record.nanoseconds / 1000).toFixed(1)} µs, ${number(record.fuel)} fuel: record`),
      h("pre", { tabindex: "0", "aria-label": "Record" }, JSON.stringify({ input: record.input, answer: record.answer, imports: record.imports }, null, 1))));
  const quiet = records.length - matter.length;
  return [
    quiet > 0 && h("p", { class: "muted small" }, `${count(quiet, "call")} changed nothing.`),
    h("ol", { class: "records" }, matter.slice(0, SHOWN).map(item)),
    matter.length > SHOWN && h("p", { class: "muted small" }, `${count(matter.length - SHOWN, "further record")}: GET /v1/requests/ID/trace`),
  ];
}

/** The reply of one choice, which grows. */
class Transcript {
  constructor(label) {
    this.text = h("div", { class: "transcript", tabindex: "0", role: "log", "aria-label": label });
    this.last = null;
  }

  add({ kind, name, text: piece, is_error: isError }) {
    if (kind === "whole-call") {
      if (this.last?.dataset.kind === "call") this.last = null;
      else this.block("call", name).append(piece);
      return;
    }
    const isNew = !this.last || this.last.dataset.kind !== kind || (kind === "call" && name) || kind === "ran";
    const block = isNew ? this.block(kind, name, isError) : this.last;
    const end = block.lastChild;
    if (end instanceof Text) end.appendData(piece ?? "");
    else block.append(piece ?? "");
  }

  block(kind, name, isError) {
    const label = { reasoning: "Reasoning", answer: "Answer", call: `Call of ${name || "a tool"}`, ran: `Result of ${name}` }[kind] ?? kind;
    this.last = h("div", { class: `block ${kind} ${isError ? "bad" : ""}`, "data-kind": kind }, h("span", { class: "label" }, label));
    this.text.append(this.last);
    return this.last;
  }

  note({ tokens, note }) {
    const mark = h("span", { class: "mark" }, h("span", { class: "at" }, `token ${number(tokens)}`), note);
    (this.last ?? this.text).append(mark);
  }

  /** Takes back text, a count of bytes of a kind, newest first. */
  rewind({ reasoning, answer }) {
    for (const [kind, count] of Object.entries({ reasoning, answer })) {
      let left = count;
      const blocks = [...this.text.querySelectorAll(`[data-kind=${kind}]`)].reverse();
      for (const block of blocks) {
        for (const node of [...block.childNodes].reverse()) {
          if (left === 0 || node.nodeType !== Node.TEXT_NODE) continue;
          const data = new TextEncoder().encode(node.data);
          const gone = Math.min(left, data.length);
          node.data = new TextDecoder().decode(data.subarray(0, data.length - gone));
          left -= gone;
        }
      }
    }
  }
}

export function life(element, state, id) {
  const abort = new AbortController();
  const status = h("span");
  const facts = h("dl", { class: "facts" });
  const prompt = h("div", { class: "prompt-bar" });
  const replies = h("div", { class: "replies" });
  const trace = h("div", {}, h("p", { class: "muted" }, "The trace is read when the request has ended."));
  const reload = h("button", { type: "button", class: "quiet", onclick: () => readTrace() }, "Read now");
  element.append(
    h("p", { class: "back" }, h("a", { href: "#/requests" }, "‹ All requests")),
    title("Request", "", status),
    h("p", { class: "mono muted wrap" }, id),
    h("section", { class: "card" }, facts, prompt, h("ul", { class: "legend" },
      h("li", {}, h("i", { class: "cached" }), "from the cache"), h("li", {}, h("i", { class: "computed" }), "computed"), h("li", {}, h("i", { class: "left" }), "to come"))),
    h("div", { class: "columns" },
      h("section", { class: "card" }, h("h2", {}, "Reply"), replies),
      h("section", { class: "card" }, h("div", { class: "row" }, h("h2", {}, "Policy decisions"), reload), trace)),
  );
  if (!state.isOperator) {
    replies.replaceChildren(notice("info", h("p", {}, "The text of a request and its decisions are shown to an operator's key.")));
    return () => {};
  }

  const transcripts = new Map();
  const transcript = (choice) => {
    if (!transcripts.has(choice)) {
      const made = new Transcript(`Reply ${choice + 1}`);
      transcripts.set(choice, made);
      if (choice > 0) replies.append(h("h3", {}, `Choice ${choice + 1}`));
      replies.append(made.text);
    }
    return transcripts.get(choice);
  };

  let profile = null;
  function describe(request) {
    ({ profile } = request);
    if (status.textContent !== request.phase) status.replaceChildren(chip(request.phase));
    const rate = request.tokens_per_second;
    const shown = [
      ["Prompt", `${number(request.prompt_tokens)} tokens`],
      ["From the cache", `${number(request.cached_tokens)} (${percent(request.cached_tokens, request.prompt_tokens)})`],
      ["Reply", request.max_answer_tokens === null
        ? `${number(request.reply_tokens)} of at most ${number(request.max_tokens)} tokens`
        : `${number(request.reply_tokens)} tokens, at most ${number(request.max_answer_tokens)} of them answer`],
      ["Tokens/s", rate ? rate.toFixed(1) : "–"],
      ["First piece", duration(request.first_piece_ms)],
      ["Time", duration(request.elapsed_ms)],
      ["Profile", request.profile ?? "–"],
      ["Model", request.model ?? "–"],
      ["Route", request.stream ? `${request.route}, stream` : request.route],
      ["Arrived", time(request.arrived)],
    ];
    if (request.drafted_tokens) shown.push(["Drafts accepted", `${number(request.accepted_tokens)} of ${number(request.drafted_tokens)}`]);
    if (typeof request.reasoning_tokens === "number") shown.push(["Reasoning, answer", `${number(request.reasoning_tokens)}, ${number(request.answer_tokens)} tokens`]);
    if (request.reason) shown.push(["Ended by", request.reason]);
    if (request.error) shown.push(["Error", `${request.status} ${request.error}`]);
    if (facts.childElementCount !== 2 * shown.length) facts.replaceChildren(...shown.flatMap(([name, value]) => fact(name, value)));
    shown.forEach(([, value], i) => text(facts.children[2 * i + 1], value));
    prompt.replaceChildren(promptBar(request));
  }

  async function readTrace() {
    try {
      const { records, tool_runs: runs = [] } = await get(`/v1/requests/${encodeURIComponent(id)}/trace`, abort.signal);
      trace.replaceChildren(...decisions(records).filter(Boolean));
      if (runs.length) trace.append(h("p", { class: "muted small" }, `${count(runs.length, "call")} of tools ran on this server.`));
    } catch (error) {
      if (abort.signal.aborted) return;
      trace.replaceChildren(h("p", { class: "muted" }, error.code === "trace_not_found" ? "No policy was called." : error.message));
    }
  }

  /** Shows what has come since the last time: a reply may bring a thousand pieces a second. */
  function draw(queue) {
    const box = replies.lastElementChild;
    const isDown = !box || nearEnd(box);
    const merged = [];
    for (const { event, data } of queue.splice(0)) {
      const last = merged.at(-1);
      const isMore = event === "piece" && last?.event === "piece" && !data.name && last.data.kind === data.kind && last.data.choice === data.choice;
      if (isMore) last.data.text += data.text;
      else merged.push({ event, data });
    }
    for (const { event, data } of merged) {
      if (event === "piece") transcript(data.choice).add(data);
      else if (event === "note") transcript(data.choice).note(data);
      else if (event === "rewound") transcript(data.choice).rewind(data);
    }
    const newest = replies.lastElementChild;
    if (isDown && newest) newest.scrollTop = newest.scrollHeight;
  }

  async function watch() {
    for (;;) {
      const queue = [];
      let isNew = true;
      let isLate = false;
      const drawing = setInterval(() => queue.length && draw(queue), 80);
      try {
        for await (const { event, data } of events(`/v1/requests/${encodeURIComponent(id)}/events`, { signal: abort.signal })) {
          if (event === "late") isLate = true;
          else if (event === "request" || event === "end") describe(data);
          else {
            // Who was too slow gets the whole reply again, unless it has ended.
            if (isNew && (event === "piece" || !replies.firstChild)) {
              replies.replaceChildren();
              transcripts.clear();
            }
            if (isNew && event === "note" && replies.querySelector(".block")) continue;
            isNew = false;
            queue.push({ event, data });
          }
        }
      } finally {
        clearInterval(drawing);
      }
      draw(queue);
      if (!isLate) break;
    }
    if (!replies.querySelector(".block")) {
      const isTraced = state.profiles.some(({ name, trace_text: isKept }) => name === profile && isKept);
      replies.prepend(h("p", { class: "muted" }, isTraced
        ? "The text of a reply is shown while it streams; this request had ended before the page was opened. Its profile has trace_text: the policy decisions have the texts that policies were given."
        : "The text of a reply is shown while it streams. It is not kept: this request had ended before the page was opened."));
    }
    reload.hidden = true;
    await readTrace();
  }

  watch().catch((error) => {
    if (!abort.signal.aborted) replies.replaceChildren(notice("bad", h("p", {}, error.message)));
  });
  return () => abort.abort();
}

const nearEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < 40;
