// A chat box: a conversation with a model, with a profile and control of the reasoning.

import { events, get } from "./api.js";
import { h, title, text, notice, number } from "./dom.js";

/** The conversation outlives the view, not the tab. */
const messages = [];

/** Text with fenced code as blocks; everything else stays as it is. */
function formatted(source) {
  return source.split(/^```/m).map((part, i) => {
    if (i % 2 === 0) return part.trim() ? h("p", { class: "pre" }, part.trim()) : null;
    const [language, ...lines] = part.split("\n");
    return h("pre", { tabindex: "0", "aria-label": language.trim() ? `Code: ${language.trim()}` : "Code" }, h("code", {}, lines.join("\n").trimEnd()));
  }).filter(Boolean);
}

function bubble(message, state) {
  const body = h("div", { class: "body" });
  const thoughts = h("p", { class: "pre" });
  const reasoning = h("details", { class: "thoughts" }, h("summary", {}, "Reasoning"), thoughts);
  const foot = h("p", { class: "foot muted small" });
  const element = h("div", { class: `message ${message.role}` }, h("p", { class: "who" }, message.role === "user" ? "You" : message.model ?? "Model"));
  if (message.role === "assistant") element.append(reasoning);
  element.append(body, foot);
  const draw = (isRunning) => {
    reasoning.hidden = !message.reasoning;
    if (isRunning) reasoning.open = message.content === "";
    thoughts.textContent = message.reasoning ?? "";
    if (isRunning || message.role === "user") body.replaceChildren(h("p", { class: "pre" }, message.content, isRunning ? h("span", { class: "cursor" }) : ""));
    else body.replaceChildren(...formatted(message.content));
    if (message.error) body.append(notice("bad", h("p", {}, message.error)));
    foot.replaceChildren(message.foot ?? "");
    if (message.id && !isRunning) foot.append(" ", state.isOperator ? h("a", { href: `#/requests/${encodeURIComponent(message.id)}` }, "What happened") : "");
    for (const note of isRunning ? [] : message.notes ?? []) foot.append(h("span", { class: "mark" }, note));
  };
  return { element, draw };
}

const field = (id, label, control) => h("div", { class: "field" }, h("label", { for: id }, label), control);

export function chat(element, state, profile) {
  const model = h("select", { id: "chat-model" });
  const profiles = h("select", { id: "chat-profile" }, state.profiles.map(({ name }) => h("option", { value: name }, name)));
  const thinking = h("select", { id: "chat-thinking" }, [["", "The policy decides"], ["on", "On"], ["off", "Off"]].map(([value, label]) => h("option", { value }, label)));
  const budget = h("input", { id: "chat-budget", type: "number", min: "0", step: "1", placeholder: "no limit" });
  const temperature = h("input", { id: "chat-temperature", type: "number", min: "0", max: "2", step: "0.1", placeholder: "of the profile" });
  const most = h("input", { id: "chat-max", type: "number", min: "1", step: "1", placeholder: "of the server" });
  const system = h("textarea", { id: "chat-system", rows: "3", placeholder: "none" });
  const settings = [model, profiles, thinking, budget, temperature, most, system];
  const own = state.access.profile ?? "default";
  profiles.value = state.profiles.some(({ name }) => name === profile) ? profile : state.profiles.some(({ name }) => name === own) ? own : state.profiles[0]?.name ?? "";
  for (const control of settings) {
    const saved = sessionStorage.getItem(control.id);
    if (saved !== null && !(control === profiles && profile) && control !== model) control.value = saved;
    control.addEventListener("change", () => sessionStorage.setItem(control.id, control.value));
  }

  const list = h("div", { class: "messages", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const hello = h("div", { class: "empty" }, h("p", { class: "strong" }, "Ask something"), h("p", { class: "muted" }, "Enter sends, Shift+Enter begins a new line. Reasoning is folded when the answer begins."));
  const input = h("textarea", { id: "chat-input", rows: "2", "aria-label": "Message", placeholder: "Message" });
  const button = h("button", { class: "primary", id: "chat-send" }, "Send");
  const clear = h("button", { type: "button", class: "quiet" }, "New chat");
  const form = h("form", { class: "composer" }, input, button);
  const panel = h("details", { class: "settings card", open: matchMedia("(min-width: 900px)").matches }, h("summary", {}, "Settings"),
    h("div", { class: "fields" },
      field("chat-model", "Model", model), field("chat-profile", "Profile", profiles), field("chat-thinking", "Reasoning", thinking),
      field("chat-budget", "Reasoning tokens, at most", budget), field("chat-temperature", "Temperature", temperature),
      field("chat-max", "Reply tokens, at most", most), field("chat-system", "System message", system)));
  element.append(title("Chat", "Requests from here are listed like any other.", clear),
    h("div", { class: "chat-columns" }, h("div", { class: "conversation card" }, hello, list, form), panel));

  let running = null;
  const isDown = () => list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  const down = () => { list.scrollTop = list.scrollHeight; };

  function add(message) {
    const made = bubble(message, state);
    list.append(made.element);
    hello.hidden = true;
    return made;
  }
  messages.forEach((message) => add(message).draw(false));
  hello.hidden = messages.length > 0;
  list.hidden = messages.length === 0;

  function body() {
    const { value: name } = profiles;
    const asked = { model: model.value, stream: true, stream_options: { include_usage: true } };
    asked.messages = [
      ...(system.value.trim() ? [{ role: "system", content: system.value }] : []),
      ...messages.filter((message) => !message.error).map(({ role, content }) => ({ role, content })),
    ];
    if (thinking.value) asked.chat_template_kwargs = { enable_thinking: thinking.value === "on" };
    if (budget.value !== "") asked.max_thinking_tokens = Number(budget.value);
    if (temperature.value !== "") asked.temperature = Number(temperature.value);
    if (most.value !== "") asked.max_tokens = Number(most.value);
    return { asked, headers: name ? { "x-steersman-profile": name } : {} };
  }

  async function send() {
    const content = input.value.trim();
    if (!content || running) return;
    running = new AbortController();
    text(button, "Stop");
    list.hidden = false;
    const question = { role: "user", content };
    messages.push(question);
    add(question).draw(false);
    input.value = "";
    // A message can be sent before the server has listed its models.
    await listed;
    const { asked, headers } = body();
    const answer = { role: "assistant", model: model.value, content: "", reasoning: "" };
    const shown = add(answer);
    shown.draw(true);
    down();
    const started = performance.now();
    let first = 0;
    try {
      for await (const { data } of events("/v1/chat/completions", { body: asked, headers, signal: running.signal })) {
        if (data.error) throw new Error(data.error.message);
        answer.id = data.id ?? answer.id;
        const delta = data.choices?.[0]?.delta ?? {};
        if (!first && (delta.content || delta.reasoning_content)) first = performance.now();
        answer.reasoning += delta.reasoning_content ?? "";
        answer.content += delta.content ?? "";
        for (const call of delta.tool_calls ?? []) answer.content += `${call.function?.name ? `\n[calls ${call.function.name}] ` : ""}${call.function?.arguments ?? ""}`;
        if (data.steersman?.notes) answer.notes = data.steersman.notes;
        if (data.usage) answer.usage = data.usage;
        const follow = isDown();
        shown.draw(true);
        if (follow) down();
      }
    } catch (error) {
      if (error.name === "AbortError") answer.foot = "Stopped. ";
      else answer.error = error.message;
    }
    const { usage } = answer;
    if (usage) {
      const seconds = (performance.now() - (first || started)) / 1000;
      const reasoning = usage.completion_tokens_details?.reasoning_tokens;
      answer.foot = `${number(usage.completion_tokens)} tokens${reasoning ? `, ${number(reasoning)} of them reasoning` : ""}, ${(usage.completion_tokens / Math.max(seconds, 0.001)).toFixed(1)} tokens/s; prompt ${number(usage.prompt_tokens)}, ${number(usage.prompt_tokens_details?.cached_tokens ?? 0)} from the cache.`;
    }
    messages.push(answer);
    const follow = isDown();
    shown.draw(false);
    if (follow) down();
    running = null;
    text(button, "Send");
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
    if (event.key === "Escape") running?.abort();
  });
  clear.addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    list.replaceChildren();
    list.hidden = true;
    hello.hidden = false;
    input.focus();
  });

  const abort = new AbortController();
  const listed = get("/v1/models", abort.signal).then(({ data }) => {
    const names = data.map(({ id }) => id).filter((id) => !id.includes("@"));
    model.append(...names.map((id) => h("option", { value: id }, id)));
    const saved = sessionStorage.getItem("chat-model");
    if (names.includes(saved)) model.value = saved;
  }).catch((error) => {
    if (!abort.signal.aborted) element.append(notice("bad", h("p", {}, error.message)));
  });
  return () => {
    abort.abort();
    running?.abort();
  };
}
