// The frame: which view is open, the key, the theme, and whether the server answers.

import { get, key, post, ApiError } from "./api.js";
import { h, text, notice } from "./dom.js";
import { local } from "./storage.js";
import { requests } from "./requests.js";
import { life } from "./life.js";
import { policies } from "./policies.js";
import { profiles } from "./profiles.js";
import { models } from "./models.js";
import { chat } from "./chat.js";
import { connect } from "./connect.js";
import { keys } from "./keys.js";
import { log } from "./log.js";

const VIEWS = { requests, policies, profiles, models, chat, connect, keys, log };
const main = document.querySelector("#main");

/** What the key may do: `GET /v1/profiles`. Shared by all views. */
export const state = { access: null, profiles: [], isOperator: false };

let open = { stop: () => {} };

/** The parts of the address, of which anyone may make one that is none. */
function place() {
  try {
    return location.hash.split("/").map(decodeURIComponent);
  } catch {
    return [];
  }
}

/** Opens the view that the address names. A view is a function `(element, state, argument)` that returns how to stop it. */
function show() {
  const [, name = "requests", argument] = place();
  const view = name === "requests" && argument ? life : Object.hasOwn(VIEWS, name) && VIEWS[name];
  if (!view) {
    location.hash = "#/requests";
    return;
  }
  open.stop();
  const element = h("div", { class: `view ${name}` });
  main.replaceChildren(element);
  document.querySelectorAll("[data-view]").forEach((link) => {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · Steersman`;
  open = { stop: view(element, state, argument) ?? (() => {}) };
  main.querySelector("h1")?.focus({ preventScroll: true });
}

const connection = document.querySelector("#connection");

function tell(kind, words) {
  connection.className = `connection ${kind}`;
  text(connection, words);
}

/** What the key may do, in words. */
const rights = () => ({ operator: "Operator", server: "All profiles", profile: `Profile ${state.access.profile}`, none: "No key" })[state.access.key];

/** How often `begin` runs now. */
let beginning = 0;
/** Whether the server did not answer the last request. */
let isAway = false;

/** Waits until the server answers, then finds out what the key may do and opens the view. */
async function begin() {
  beginning += 1;
  try {
    if (!(await isKnown())) return;
  } finally {
    beginning -= 1;
  }
  isAway = false;
  tell("good", rights());
  text(document.querySelector("#key-label"), key.get() ? "Change key" : "Key");
  show();
}

/** Finds out what the key may do, as soon as the server answers; returns false if it asks for another. */
async function isKnown() {
  open.stop();
  open = { stop: () => {} };
  for (;;) {
    try {
      const { access, profiles: all } = await get("/v1/profiles");
      Object.assign(state, { access, profiles: all, isOperator: access.key === "operator" });
      return true;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) return false;
      const isLoading = error.code === "server_loading";
      const [word, words, next] = isLoading
        ? ["Loading", "The server loads its model", "This page opens by itself as soon as it is ready."]
        // What else an answer says, such as that the server has too many connections, is told in its words.
        : ["No answer", error.status === 0 ? "The server does not answer" : error.message, "This page tries again every second."];
      tell("waiting", word);
      main.replaceChildren(notice("info", h("p", { class: "strong" }, words), h("p", {}, next)));
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}

/** Sees whether a server that answers again is the one from before: it may have been started with other keys and profiles. */
async function meet() {
  const before = JSON.stringify([state.access, state.profiles]);
  const found = await get("/v1/profiles").catch(() => null);
  // Who asks for a key, or is away again, has said so.
  if (!found || state.access === null) return;
  if (JSON.stringify([found.access, found.profiles]) === before) tell("good", rights());
  else begin();
}

window.addEventListener("contact", ({ detail: words }) => {
  if (beginning > 0 || state.access === null) return;
  if (words) tell("waiting", words);
  else if (isAway) meet();
  isAway = Boolean(words);
});

// Such as the key of the link, which ends with the server.
window.addEventListener("refused", () => {
  if (beginning === 0 && state.isOperator) begin();
});

/** Exchanges the token of the link that the server printed, `#/enter/TOKEN`, for an operator's key. The address loses it first. Returns what is wrong, if anything. */
async function enter() {
  const [, name, token] = location.hash.split("/");
  if (name !== "enter") return null;
  history.replaceState(null, "", "#/requests");
  try {
    key.set((await post("/v1/session", { token })).key, true);
    return null;
  } catch (error) {
    return error.message;
  }
}

async function start() {
  const problem = await enter();
  await begin();
  if (problem) askForKey(problem);
}

// The key.

const dialog = document.querySelector("#key-dialog");
const input = document.querySelector("#key-input");
const problem = document.querySelector("#key-problem");

function askForKey(words) {
  problem.hidden = !words;
  problem.textContent = words ?? "";
  document.querySelector("#key-forget").hidden = !key.get();
  document.querySelector("#key-cancel").hidden = state.access === null;
  if (!dialog.open) dialog.showModal();
  input.value = "";
  input.focus();
}

window.addEventListener("needs-key", ({ detail }) => {
  open.stop();
  open = { stop: () => {} };
  const wrong = key.get() !== "";
  key.set("");
  state.access = null;
  tell("waiting", "Locked");
  main.replaceChildren(h("div", { class: "locked" }, h("h1", { tabindex: "-1" }, "Locked"), h("p", { class: "muted" }, "This server shows nothing without a key."),
    h("button", { class: "primary", type: "button", onclick: () => askForKey() }, "Enter a key")));
  askForKey(detail ?? (wrong ? "The server does not know this key." : null));
});

document.querySelector("#key").addEventListener("click", () => askForKey());
document.querySelector("#key-cancel").addEventListener("click", () => dialog.close());
document.querySelector("#key-forget").addEventListener("click", () => {
  key.set("");
  dialog.close();
  begin();
});
document.querySelector("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = input.value.trim();
  // No header carries others, such as the “…” behind the beginning of a key in a list.
  if (!/^[\x20-\x7e]*$/.test(value)) return askForKey("This is no key: it has characters that no key has.");
  key.set(value);
  input.value = "";
  dialog.close();
  begin();
});

// The theme: that of the system, unless the user has chosen.

const THEMES = ["system", "light", "dark"];

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  text(document.querySelector("#theme-label"), `Theme: ${name}`);
}

theme(local.get("steersman-theme") ?? "system");
document.querySelector("#theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length];
  local.set("steersman-theme", next);
  theme(next);
});

// Digits open the views, unless something is being typed.
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  const name = Object.keys(VIEWS)[Number(event.key) - 1];
  if (!typing && name && !event.ctrlKey && !event.metaKey && !event.altKey) location.hash = `#/${name}`;
});
window.addEventListener("hashchange", () => (location.hash.startsWith("#/enter/") ? start() : state.access && show()));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

start();
