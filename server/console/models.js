// The models: which are loaded, loading and unloading, downloads, and memory by account.

import { ApiError, events, get, post, send } from "./api.js";
import { h, keyed, title, chip, fact, bytes, number, short, duration, bar, notice, toast, confirm, empty, code, text } from "./dom.js";
import { ACCOUNTS, poll, usedBytes } from "./requests.js";
import { search } from "./search.js";
import { upstreams } from "./upstreams.js";

const STATES = { loaded: "answer", loading: "prefill", unloading: "prefill", "on disk": "cancelled", missing: "failed", upstream: "waiting" };

/** Memory of all arrays of the process, by account. Weights and caches are summed over the engines. */
function memory(engines) {
  if (!engines.length) return empty("No model is loaded", "Memory appears here with the first one.");
  const { limit, arrays } = engines[0].bytes;
  const sums = ACCOUNTS.map(([field, name, kind]) => ({ name, kind, value: engines.reduce((sum, engine) => sum + (engine.bytes[field] ?? 0), 0) }));
  const known = sums.reduce((sum, part) => sum + part.value, 0);
  const used = usedBytes(engines);
  const parts = [...sums, { name: "Other arrays", kind: "other", value: Math.max(arrays - known, 0) }].map((part) => ({ ...part, text: bytes(part.value) }));
  const shown = [...parts, { name: "Free", kind: "free", value: Math.max(limit - used, 0), text: bytes(Math.max(limit - used, 0)) }];
  return h("div", {},
    h("p", {}, h("span", { class: "figure" }, bytes(used)), h("span", { class: "muted" }, ` of ${bytes(limit)} for arrays`)),
    h("div", { class: "tall" }, bar("Memory", parts, limit)),
    h("ul", { class: "legend" }, shown.map((part) => h("li", {}, h("i", { class: part.kind }), `${part.name} `, h("span", { class: "strong" }, part.text)))));
}

/** The state of a model: `report.state` knows of loading, `entry.state` of the files. */
const stateOf = ({ model: entry, report }) => (report.state !== "on disk" ? report.state : entry.state);

/** What a key may do with a model: `keep_alive` of `POST /api/generate` is how long it stays loaded. */
const ACTS = [
  ["Load", "on disk", undefined, "is loaded"],
  ["Unload", "loaded", 0, "is unloaded"],
  ["Keep loaded", "loaded", -1, "stays loaded"],
];

/** Shows the buttons of a model if they are others than before. A button that had the focus gives it to the one in its place. */
function offer(row, item, busy, act) {
  const state = stateOf(item);
  const { id } = item.model;
  const acts = ACTS.filter(([label, from]) => from === state && (label !== "Keep loaded" || item.report.expires_s !== null));
  const shown = JSON.stringify([acts, busy.get(id)]);
  if (row.dataset.shown === shown) return;
  row.dataset.shown = shown;
  const hadFocus = row.contains(document.activeElement);
  row.replaceChildren(...(busy.has(id) ? [h("button", { type: "button", disabled: true }, busy.get(id))] : acts.map((one) => h("button", { type: "button", "aria-label": `${one[0]} ${id}`, onclick: () => act(id, one) }, one[0]))));
  row.hidden = row.childElementCount === 0;
  if (hadFocus) row.querySelector("button")?.focus();
}

function fill(card, item) {
  const { model: entry, report, aliases } = item;
  const known = [
    ["Family", entry.family], ["Size", entry.size && bytes(entry.size)], ["Parameters", entry.parameters && short(entry.parameters)],
    ["Quantization", entry.quantization], ["Context", entry.context && `${number(entry.context)} tokens`],
    ["Requests", number(report.requests)], ["Loads, unloads", `${report.loads}, ${report.unloads}`],
    ["Unloaded in", report.expires_s !== null && duration(report.expires_s * 1000)],
  ];
  const facts = known.filter(([, value]) => value).map(([name, value]) => fact(name, value));
  const state = stateOf(item);
  card.replaceChildren(
    h("div", { class: "row" }, h("h3", { class: "wrap" }, entry.id), chip(state, STATES[state])),
    aliases.length ? h("p", { class: "muted small wrap" }, `Also ${aliases.join(", ")}`) : "",
    state === "missing" ? h("p", { class: "small" }, "Its files are not on this machine: download the repo that the configuration names.") : "",
    h("dl", { class: "facts" }, facts));
}

/** The form that downloads a model, and how far a download is, whoever asked for it. Returns the element, `draw(running)`, which gets what `GET /v1/models/pull` says, and `download(model)`. `ended()` is called when a download has ended. */
function pull(state, ended) {
  const input = h("input", { id: "repo", type: "text", placeholder: "owner/name or qwen3:4b", required: true, autocomplete: "off", spellcheck: "false", pattern: "\\S+", disabled: !state.isOperator });
  const button = h("button", { class: "primary", disabled: !state.isOperator }, "Download");
  const progress = h("progress", { max: "1", value: 0, "aria-label": "Download" });
  const words = h("p", { class: "small", role: "status" });
  const stop = h("button", { type: "button", onclick: stopIt }, "Stop");
  const shown = h("div", { class: "progress", hidden: true }, progress, h("div", { class: "row" }, words, stop));
  /** Whether this page gets the reports of a download. */
  let isAsking = false;
  /** The repo of a download that another page has asked for, or this one before it lost the connection. */
  let others = null;

  function report(repo, { completed, total, file }) {
    shown.hidden = false;
    if (total) progress.value = completed / total;
    else progress.removeAttribute("value");
    text(words, total ? `${repo}: ${bytes(completed)} of ${bytes(total)}${file ? `, ${file}` : ""}` : `Asking the hub about ${repo}…`);
  }

  async function stopIt() {
    stop.disabled = true;
    try {
      await send("/v1/models/pull", { method: "DELETE" });
    } catch (error) {
      toast(error.message, "bad");
    }
    stop.disabled = false;
  }

  async function download(repo) {
    if (button.disabled) {
      toast("Another download is running", "bad");
      return;
    }
    let hasEnded = false;
    isAsking = true;
    button.disabled = true;
    stop.hidden = false;
    report(repo, { total: 0 });
    try {
      for await (const { data } of events("/v1/models/pull", { body: { model: repo } })) {
        if (data.status === "downloading") {
          if (data.memory && data.memory.fits === false) toast(`${repo} needs ${bytes(data.memory.weights)} of memory; ${bytes(data.memory.limit)} are allowed`, "bad");
          report(repo, data);
          continue;
        }
        hasEnded = true;
        if (data.status === "failed") throw new ApiError(200, "", data.error?.message ?? data.error);
        words.textContent = `${repo} is in ${data.folder}. Load it under “On this disk”.`;
        progress.value = 1;
        toast(`${repo} is downloaded`);
      }
      if (!hasEnded) throw new Error();
    } catch (error) {
      // A connection that is lost ends no download.
      if (error instanceof ApiError) {
        hasEnded = true;
        progress.value = 0;
        words.textContent = `Not downloaded: ${error.message}`;
      } else words.textContent = `The connection was lost. The server goes on with ${repo}.`;
    }
    isAsking = false;
    if (hasEnded) stop.hidden = true;
    else others = repo;
    if (hasEnded) ended();
    button.disabled = false;
  }
  const submit = (event) => {
    event.preventDefault();
    return download(input.value.trim());
  };

  function draw(running) {
    if (isAsking) return;
    button.disabled = !state.isOperator || running !== null;
    if (running) {
      others = running.model;
      stop.hidden = false;
      report(running.model, running);
    } else if (others) {
      stop.hidden = true;
      progress.value = 0;
      words.textContent = `The download of ${others} has ended. Ask for it again to see whether it is complete.`;
      others = null;
      ended();
    }
  }
  const element = h("section", { class: "card", "aria-labelledby": "pull-title" }, h("h2", { id: "pull-title" }, "Download a model"),
    h("form", { class: "inline", onsubmit: submit }, h("label", { for: "repo" }, "Repo on the Hugging Face hub"), h("div", { class: "row" }, input, button)),
    h("p", { class: "muted small" }, state.isOperator ? "Files go to the cache that Hugging Face's tools share. A download that was interrupted continues." : "Downloads need an operator's key."), shown);
  return { element, draw, download };
}

/** The models in the cache of this machine, for operators. `load(id)` loads one that is served. Returns the element, and `read()`, which lists them anew and says whether it could. */
function downloads(load) {
  const body = h("tbody");
  const none = empty("Nothing is downloaded", "Models of the hub appear here.");
  none.hidden = true;
  const problem = h("div", { role: "status" });
  const kept = h("div");
  const table = h("div", { class: "scroll", hidden: true }, h("table", {}, h("caption", { class: "sr" }, "Models on the disk"),
    h("thead", {}, h("tr", {}, ["Model", "Size", "State", h("span", { class: "sr" }, "Action")].map((name) => h("th", { scope: "col" }, name)))), body));
  async function remove({ model, bytes: size }) {
    if (!(await confirm("Remove the model?", `The files of “${model}” (${bytes(size)}) are deleted from this machine, also for other programs that share the cache.`, "Remove"))) return;
    try {
      await send("/api/delete", { method: "DELETE", body: JSON.stringify({ model }), type: "application/json" });
      toast(`${model} is removed`);
    } catch (error) {
      toast(error.message, "bad");
    }
    read();
  }
  async function serve(model, button) {
    button.disabled = true;
    text(button, "Load…");
    try {
      await post("/v1/models/serve", { model });
    } catch (error) {
      toast(`${model}: ${error.message}`, "bad");
      return read();
    }
    await read();
    return load(model);
  }
  async function withdraw(model) {
    if (!(await confirm("Stop serving the model?", `Requests that use “${model}” go on to their end, new ones are refused. Its files stay on the disk.`, "Stop serving"))) return;
    try {
      await send("/v1/models/serve", { method: "DELETE", body: JSON.stringify({ model }), type: "application/json" });
      toast(`${model} is not served any more`);
    } catch (error) {
      toast(error.message, "bad");
    }
    read();
  }
  /** What can be done with one model of an entry. Quantizations of one repo are told apart by their names. */
  function actions(entry, { model, served_by: by }) {
    const name = model === entry.model ? "" : ` ${model.slice(entry.model.length + 1)}`;
    if (by === "configuration") return h("span", { class: "muted small" }, name ? `The configuration names${name}` : "The configuration names it");
    if (by === "operator") return h("button", { type: "button", "aria-label": `Stop serving ${model}`, onclick: () => withdraw(model) }, `Stop serving${name}`);
    return h("button", { type: "button", "aria-label": `Load ${model} from the disk`, onclick: (event) => serve(model, event.currentTarget) }, `Load${name}`);
  }
  /** How a model that is served until the server ends is served from its start. */
  const lines = ({ model, toml }) => h("div", {}, h("p", { class: "small wrap" }, `${model} is served until the server ends. These lines of the configuration serve it from the start:`), code("TOML", toml));
  const row = (entry) => h("tr", {},
    h("td", { "data-label": "Model", class: "wrap" }, entry.model), h("td", { "data-label": "Size" }, bytes(entry.bytes)),
    h("td", { "data-label": "State" }, entry.served ? chip("served", "finished") : entry.complete ? chip("complete", "cancelled") : chip("incomplete", "prefill")),
    h("td", { "data-label": "" }, h("div", { class: "row" }, entry.models.map((model) => actions(entry, model)), entry.served ? "" : h("button", { type: "button", "aria-label": `Remove ${entry.model}`, onclick: () => remove(entry) }, "Remove"))));
  /** The number of the newest read: an older one that is answered later is not shown. */
  let newest = 0;
  /** Whether the list was read. */
  async function read() {
    const own = ++newest;
    try {
      const { models: all } = await get("/v1/downloads");
      if (own !== newest) return true;
      problem.replaceChildren();
      body.replaceChildren(...all.map(row));
      kept.replaceChildren(...all.flatMap((entry) => entry.models).filter((model) => model.served_by === "operator").map(lines));
      table.hidden = all.length === 0;
      none.hidden = all.length > 0;
      return true;
    } catch (error) {
      problem.replaceChildren(notice("bad", h("p", {}, error.message)));
      return false;
    }
  }
  const element = h("section", { "aria-labelledby": "disk-title" }, h("h2", { id: "disk-title" }, "On this disk"), problem, none, table, kept);
  return { element, read };
}

export function models(element, state) {
  const list = h("ul", { class: "cards plain" });
  const accounts = h("div");
  const disk = h("dl", { class: "facts" });
  const files = downloads((id) => act(id, ACTS[0]));
  const download = pull(state, files.read);
  const used = upstreams();
  element.append(
    title("Models", "What is served, what is loaded, and what takes the memory."),
    h("section", { class: "card", "aria-labelledby": "memory-title" }, h("h2", { id: "memory-title" }, "Memory"), accounts),
    h("section", { "aria-labelledby": "models-title" }, h("h2", { id: "models-title" }, "Models"), list),
    used.element,
    download.element,
    ...(state.isOperator ? [search(download.download), files.element] : []),
    h("section", { class: "card", "aria-labelledby": "cache-title" }, h("h2", { id: "cache-title" }, "Prefix cache"), disk));
  /** Models that a button of this page loads or unloads, with what it does. */
  const busy = new Map();
  async function act(id, [label, , keepAlive, done]) {
    busy.set(id, `${label}…`);
    refresh();
    try {
      await post("/api/generate", { model: id, stream: false, keep_alive: keepAlive });
      const { models: reports } = await get("/health");
      const isHeld = keepAlive === 0 && reports.find(({ model }) => model === id)?.state === "loaded";
      toast(isHeld ? `${id} stays loaded: the configuration keeps it, or requests use it` : `${id} ${done}`);
    } catch (error) {
      toast(`${id}: ${error.message}`, "bad");
    }
    busy.delete(id);
    refresh();
  }

  let before = "";
  let items = [];
  /** Names of what was served when the list of files was read. */
  let served = null;
  function refresh() {
    keyed(list, items, (item) => item.model.id, () => h("li", { class: "card model" }, h("div", { class: "known" }), h("div", { class: "actions" })), (card, item) => {
      const [known, row] = card.children;
      const now = JSON.stringify(item);
      if (card.dataset.shown !== now) {
        card.dataset.shown = now;
        fill(known, item);
      }
      offer(row, item, busy, act);
    });
  }
  return poll(async (signal) => {
    const [{ data }, health, cache, { running }] = await Promise.all([get("/v1/models", signal), get("/health", signal), get("/v1/cache", signal), state.isOperator ? get("/v1/models/pull", signal) : { running: null }]);
    download.draw(running);
    // Another page, or a server that was started again, serves others. The list is read after the names that it is kept
    // under: a change between the two shows in the next names.
    const names = JSON.stringify(health.models.map(({ model }) => model));
    if (state.isOperator && served !== names && (await files.read())) served = names;
    const own = new Map(health.models.map((report) => [report.model, report]));
    items = data.filter((entry) => own.has(entry.id)).map((entry) => ({
      model: entry, report: own.get(entry.id),
      aliases: data.filter((other) => other.alias_of === entry.id).map((other) => other.id),
    }));
    refresh();
    await used.draw(health.models.some((report) => report.state === "upstream"), signal);
    const now = JSON.stringify(health.engines.map((engine) => engine.bytes));
    if (now !== before) accounts.replaceChildren(memory(health.engines));
    before = now;
    const { memory: held, disk: stored } = cache;
    const facts = [
      ["In memory", `${bytes(held.bytes)} of ${bytes(held.budget_bytes)}`], ["Prefixes, states", `${number(held.prefixes)}, ${number(held.states)}`],
      ["On disk", stored ? `${bytes(stored.file_bytes)} of ${bytes(stored.budget_bytes)}` : "off"],
      ["Saving", stored ? stored.off ?? "on" : "off"], ["File", stored?.path ?? "–"],
    ];
    if (disk.childElementCount !== 2 * facts.length) disk.replaceChildren(...facts.flatMap(([name, value]) => fact(name, value)));
    facts.forEach(([, value], i) => text(disk.children[2 * i + 1], value));
  }, 2000);
}
