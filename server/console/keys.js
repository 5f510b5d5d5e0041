// Keys of this server, for operators: to list, create and revoke them.

import { get, key, post } from "./api.js";
import { h, keyed, title, chip, text, time, copyButton, confirm, empty, notice, toast } from "./dom.js";
import { poll } from "./requests.js";

const LIFETIMES = [
  ["", "never"],
  ["1d", "in a day"],
  ["7d", "in 7 days"],
  ["30d", "in 30 days"],
  ["90d", "in 90 days"],
  ["365d", "in a year"],
];

const KINDS = { active: "finished", expired: "waiting", revoked: "cancelled", not_yet: "failed" };

const opened = ({ opens, profile }) =>
  ({ all_profiles: "all profiles", operator: "everything", profile: `profile ${profile}` })[opens];

/** Days in which a key is said to expire soon. */
const SOON_S = 7 * 86_400;

const COLUMNS = ["Name", "Key", "Opens", "Created", "Expires", "State", ""];

function row(revoke) {
  const cells = COLUMNS.map((name) => h("td", { "data-label": name }));
  const button = h("button", { type: "button", onclick: () => revoke(button.entry) }, "Revoke");
  cells.at(-1).append(button);
  return h("tr", {}, cells);
}

function fill(line, entry) {
  const [name, prefix, opens, created, expires, state, act] = line.children;
  text(name, entry.name);
  text(prefix, `${entry.prefix}…`);
  prefix.className = "mono";
  text(opens, opened(entry));
  text(created, time(entry.created));
  text(expires, entry.expires === null ? "never" : time(entry.expires));
  if (state.dataset.shown !== entry.state) {
    state.dataset.shown = entry.state;
    state.replaceChildren(
      chip(entry.state.replace("_", " "), KINDS[entry.state]),
      ...(entry.current ? [h("span", { class: "muted small" }, " this console")] : []),
    );
  }
  state.title = entry.revoked === null ? "" : `Revoked at ${time(entry.revoked)}`;
  const [button] = act.children;
  button.entry = entry;
  button.setAttribute("aria-label", `Revoke ${entry.name}`);
  button.hidden = entry.state === "revoked";
}

/** Shows a new key, once, with what its creator has to know. */
function shown({ key: secret, entry, notes }, close) {
  return h(
    "section",
    { class: "card created", "aria-labelledby": "created-title" },
    h("h2", { id: "created-title", tabindex: "-1" }, `The key ${entry.name}`),
    h("p", {}, "Copy it now: the server keeps only its digest, and it is not shown again."),
    h(
      "p",
      { class: "row secret" },
      h("code", { id: "new-key" }, secret),
      copyButton(() => secret, "the key"),
    ),
    notes.map((note) => notice("info", h("p", {}, note))),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: close }, "Done")),
  );
}

/** Asks for a new key; `made(created)` gets it. */
function form(state, made) {
  const name = h("input", {
    id: "key-name",
    required: true,
    maxlength: "64",
    pattern: "[A-Za-z0-9._@\\-]+",
    title: "letters, digits, and - _ . @",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "laptop",
  });
  const opens = h(
    "select",
    { id: "key-opens" },
    h("option", { value: "all" }, "All profiles"),
    state.profiles.map((one) => h("option", { value: `profile ${one.name}` }, `Profile ${one.name}`)),
    h("option", { value: "operator" }, "Everything, as an operator"),
  );
  const expires = h(
    "select",
    { id: "key-expires" },
    LIFETIMES.map(([value, label]) => h("option", { value }, label)),
  );
  const problem = h("p", { class: "problem small", role: "alert", hidden: true });
  const field = (id, label, control) =>
    h("div", { class: "field" }, h("label", { for: id }, label), control);
  const button = h("button", { class: "primary" }, "Create");
  async function submit(event) {
    event.preventDefault();
    button.disabled = true;
    problem.hidden = true;
    try {
      const [kind, ...rest] = opens.value.split(" ");
      const body = { name: name.value };
      if (kind === "profile") body.profile = rest.join(" ");
      if (kind === "operator") body.operator = true;
      if (expires.value) body.expires = expires.value;
      made(await post("/v1/keys", body));
      name.value = "";
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    button.disabled = false;
  }
  return h(
    "section",
    { class: "card", "aria-labelledby": "create-title" },
    h("h2", { id: "create-title" }, "Create a key"),
    h(
      "form",
      { class: "key-form", onsubmit: submit },
      field("key-name", "Name", name),
      field("key-opens", "Opens", opens),
      field("key-expires", "Expires", expires),
      button,
    ),
    problem,
  );
}

export function keys(element, state) {
  element.append(
    title("Keys", "Keys with names, which this server accepts and refuses at once. Those of the configuration are not listed."),
  );
  if (!state.isOperator) {
    element.append(notice("info", h("p", {}, "Keys are listed, created and revoked with an operator's key.")));
    return () => {};
  }
  const body = h("tbody");
  const head = COLUMNS.map((name) => h("th", { scope: "col" }, name || h("span", { class: "sr" }, "Action")));
  const table = h(
    "div",
    { class: "scroll", hidden: true },
    h("table", { class: "keys-table" }, h("caption", { class: "sr" }, "Keys"), h("thead", {}, h("tr", {}, head)), body),
  );
  const none = empty("No key was created", "Without keys, everyone who reaches this server may use the profiles that have none.");
  none.hidden = true;
  const made = h("div", { class: "made" });
  const soon = h("div", { role: "status" });
  const wrong = h("div", { role: "status" });

  function show(created) {
    made.replaceChildren(shown(created, () => made.replaceChildren()));
    made.querySelector("h2").focus();
    refresh();
  }

  async function revoke(entry) {
    const own = entry.current ? " This console uses it, and asks for another key then." : "";
    const question = `Requests with “${entry.name}” (${entry.prefix}…) are refused at once, for good.${own}`;
    if (!(await confirm("Revoke the key?", question, "Revoke"))) return;
    const path = `/v1/keys/${encodeURIComponent(entry.name)}/revoke`;
    try {
      await post(path, {}).catch(async (error) => {
        if (error.code !== "last_operator_key") throw error;
        const message = error.message.replace(/; send .*/, ".");
        if (await confirm("Revoke the last operator's key?", message, "Revoke it nevertheless")) return post(path, { last: true });
        throw new Error("It was not revoked.");
      });
      toast(`${entry.name} is revoked`);
      if (entry.current) {
        key.set("");
        location.reload();
        return;
      }
    } catch (error) {
      toast(error.message, "bad");
    }
    refresh();
  }

  const abort = new AbortController();
  async function refresh() {
    try {
      const { keys: all } = await get("/v1/keys", abort.signal);
      wrong.replaceChildren();
      // Those that work first, the newest first.
      const list = [...all].reverse().sort((a, b) => (a.state === "revoked") - (b.state === "revoked"));
      keyed(body, list, (entry) => `${entry.prefix} ${entry.created}`, () => row(revoke), fill);
      table.hidden = list.length === 0;
      none.hidden = list.length > 0;
      const operators = all.filter((entry) => entry.opens === "operator" && entry.state === "active");
      const last = Math.max(...operators.map(({ expires }) => expires ?? Infinity));
      const ends = operators.length > 0 && last - Date.now() / 1000 < SOON_S;
      soon.replaceChildren(...(ends
        ? [notice("info", h("p", {}, `The last operator's key of this list expires at ${time(last)}: create another before.`))]
        : []));
    } catch (error) {
      if (abort.signal.aborted || error.status === 0 || error.status === 401) return;
      wrong.replaceChildren(notice("bad", h("p", {}, error.message)));
    }
  }
  element.append(form(state, show), made, soon, wrong, h("section", {}, h("h2", {}, "Created keys"), none, table));
  const stop = poll(refresh, 5000);
  return () => {
    stop();
    abort.abort();
  };
}
