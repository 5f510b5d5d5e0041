// A chat with a model: the conversation that is open, those that are kept, and the settings.

import { key } from "./api.js";
import { h, title, text, notice, toast } from "./dom.js";
import { Conversation } from "./conversation.js";
import { Conversations } from "./conversations.js";
import { history } from "./history.js";
import { bubble } from "./message.js";
import { receive } from "./reply.js";
import { settings } from "./settings.js";
import { tab } from "./storage.js";

/** The name under which a tab knows its open conversation. */
const OPEN = "chat-open";
/** Milliseconds between two drawings, and between two savings, of a reply that streams. */
const DRAW_MS = 60;
const SAVE_MS = 2000;
/** Problems of saving that were shown: each is said once. */
const told = new Set();

export function chat(element, state, profile) {
  const abort = new AbortController();
  const store = new Conversations(state.access, key.isLinked());
  const asked = settings(state, profile, abort.signal);
  const kept = history(store, {
    open: (id) => open(store.get(id)),
    removed: (id) => id === conversation.id && open(null),
    current: () => conversation,
    add: (imported) => {
      open(imported);
      save();
      kept.draw();
    },
  });
  const list = h("div", {
    class: "messages",
    role: "log",
    "aria-label": "Conversation",
    tabindex: "0",
  });
  const hello = h(
    "div",
    { class: "empty" },
    h("p", { class: "strong" }, "Ask something"),
    h(
      "p",
      { class: "muted" },
      "Enter sends, Shift+Enter begins a new line. Reasoning is folded when the answer begins.",
    ),
  );
  const input = h("textarea", {
    id: "chat-input",
    rows: "2",
    "aria-label": "Message",
    placeholder: "Message",
  });
  const button = h("button", { class: "primary", id: "chat-send" }, "Send");
  const clear = h("button", { type: "button", class: "quiet" }, "New chat");
  const form = h("form", { class: "composer" }, input, button);
  const problems = h("div", { class: "problems", role: "status" });
  element.append(
    title("Chat", "Requests from here are listed like any other.", clear),
    h(
      "div",
      { class: "chat-columns" },
      h("div", { class: "conversation card" }, hello, list, problems, form),
      h("div", { class: "side" }, kept.element, asked.element),
    ),
  );

  let conversation;
  /** How to stop the reply that streams. */
  let running = null;
  const isDown = () => list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  const down = () => {
    list.scrollTop = list.scrollHeight;
  };

  function save() {
    const { removed, problem } = store.save(conversation);
    if (removed.length)
      toast(`Deleted to make room: ${removed.map((name) => `“${name}”`).join(", ")}`);
    if (problem && !told.has(problem)) {
      told.add(problem);
      problems.replaceChildren(notice("info", h("p", {}, problem)));
    }
  }

  const acts = {
    choose(message, by) {
      stop();
      conversation.choose(message);
      save();
      const shown = show().get(message.id);
      const [same, other] = by < 0 ? [".previous", ".next"] : [".next", ".previous"];
      (shown.querySelector(`${same}:enabled`) ?? shown.querySelector(other)).focus();
      shown.scrollIntoView({ block: "nearest" });
    },
    edit(message, content) {
      stop();
      conversation.add({ role: "user", content }, message.parent);
      show();
      answer();
    },
    regenerate(message) {
      stop();
      conversation.leave(message);
      show();
      answer();
    },
  };

  function add(message) {
    const made = bubble(message, state, conversation.siblings(message), acts);
    list.append(made.element);
    hello.hidden = true;
    list.hidden = false;
    return made;
  }

  /** Stops the reply that streams, if any. */
  function stop() {
    running?.abort();
    running = null;
    text(button, "Send");
  }

  /** Shows the messages of the conversation. Returns their elements by id. */
  function show() {
    list.replaceChildren();
    const path = conversation.path();
    list.hidden = path.length === 0;
    hello.hidden = path.length > 0;
    return new Map(
      path.map((message) => {
        const made = add(message);
        made.draw(false);
        return [message.id, made.element];
      }),
    );
  }

  /** Opens a conversation; null begins a new one. */
  function open(next) {
    stop();
    conversation = next ?? new Conversation();
    tab.set(OPEN, conversation.id);
    show();
    kept.draw(conversation.id);
    down();
  }

  async function send() {
    const content = input.value.trim();
    if (!content || running) return;
    add(conversation.add({ role: "user", content })).draw(false);
    input.value = "";
    await answer();
  }

  /** Gets a reply to the messages that are shown. */
  async function answer() {
    const own = conversation;
    const ours = new AbortController();
    running = ours;
    text(button, "Stop");
    save();
    kept.draw();
    down();
    // A message can be sent before the server has listed its models.
    await asked.listed.catch(() => {});
    if (ours.signal.aborted) return;
    const request = asked.request(own.path());
    const message = own.add({
      role: "assistant",
      model: request.body.model,
      content: "",
      reasoning: "",
      notes: [],
    });
    const shown = add(message);
    const draw = (isRunning) => {
      const follow = isDown();
      shown.draw(isRunning);
      if (follow) down();
    };
    draw(true);
    const drawing = new Timer(DRAW_MS, () => draw(true));
    const saving = new Timer(SAVE_MS, () => own === conversation && save());
    await receive(request, message, ours.signal, () => {
      drawing.start();
      saving.start();
    });
    drawing.stop();
    saving.stop();
    draw(false);
    if (own === conversation) {
      save();
      kept.draw();
    } else if (store.get(own.id)) store.save(own);
    if (running === ours) stop();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) stop();
    else send();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
    if (event.key === "Escape") stop();
  });
  clear.addEventListener("click", () => {
    open(null);
    input.focus();
  });
  const unwatch = store.watch((id) => {
    const newer = store.get(id);
    if (id === conversation.id && newer && !running) open(newer);
    else kept.draw();
  });
  // What has streamed so far stays when the page is left.
  const leave = () => running && save();
  window.addEventListener("pagehide", leave);
  asked.listed.catch((error) => {
    if (!abort.signal.aborted) element.append(notice("bad", h("p", {}, error.message)));
  });

  open(store.get(tab.get(OPEN) ?? ""));
  return () => {
    unwatch();
    window.removeEventListener("pagehide", leave);
    stop();
    abort.abort();
  };
}

/** Runs `work` at most once in `ms`, after `start`. */
class Timer {
  #timer = null;

  constructor(ms, work) {
    Object.assign(this, { ms, work });
  }

  start() {
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      this.work();
    }, this.ms);
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }
}
