// The settings of a chat: model, profile, reasoning and limits. They end with the tab.

import { get } from "./api.js";
import { h } from "./dom.js";
import { tab } from "./storage.js";

const field = (id, label, control) =>
  h("div", { class: "field" }, h("label", { for: id }, label), control);

/**
 * Returns the element; `listed`, which resolves when the models are known; and `request(messages)`,
 * the body and headers of a request.
 */
export function settings(state, profile, signal) {
  const model = h("select", { id: "chat-model" });
  const profiles = h(
    "select",
    { id: "chat-profile" },
    state.profiles.map(({ name }) => h("option", { value: name }, name)),
  );
  const thinking = h(
    "select",
    { id: "chat-thinking" },
    [
      ["", "The policy decides"],
      ["on", "On"],
      ["off", "Off"],
    ].map(([value, label]) => h("option", { value }, label)),
  );
  const budget = h("input", {
    id: "chat-budget",
    type: "number",
    min: "0",
    step: "1",
    placeholder: "no limit",
  });
  const temperature = h("input", {
    id: "chat-temperature",
    type: "number",
    min: "0",
    max: "2",
    step: "0.1",
    placeholder: "default of the profile",
  });
  const most = h("input", {
    id: "chat-max",
    type: "number",
    min: "1",
    step: "1",
    placeholder: "limit of the server",
  });
  const system = h("textarea", { id: "chat-system", rows: "3", placeholder: "none" });
  const own = state.access.profile ?? "default";
  profiles.value = state.profiles.some(({ name }) => name === profile)
    ? profile
    : state.profiles.some(({ name }) => name === own)
      ? own
      : (state.profiles[0]?.name ?? "");
  for (const control of [model, profiles, thinking, budget, temperature, most, system]) {
    const saved = tab.get(control.id);
    if (saved !== null && !(control === profiles && profile) && control !== model)
      control.value = saved;
    control.addEventListener("change", () => tab.set(control.id, control.value));
  }
  const element = h(
    "details",
    { class: "settings card", open: matchMedia("(min-width: 900px)").matches },
    h("summary", {}, "Settings"),
    h(
      "div",
      { class: "fields" },
      field("chat-model", "Model", model),
      field("chat-profile", "Profile", profiles),
      field("chat-thinking", "Reasoning", thinking),
      field("chat-budget", "Reasoning tokens, at most", budget),
      field("chat-temperature", "Temperature", temperature),
      field("chat-max", "Reply tokens, at most", most),
      field("chat-system", "System message", system),
    ),
  );

  const listed = get("/v1/models", signal).then(({ data }) => {
    const names = data.map(({ id }) => id).filter((id) => !id.includes("@"));
    model.append(...names.map((id) => h("option", { value: id }, id)));
    const saved = tab.get("chat-model");
    if (names.includes(saved)) model.value = saved;
  });

  function request(messages) {
    const body = { model: model.value, stream: true, stream_options: { include_usage: true } };
    body.messages = [
      ...(system.value.trim() ? [{ role: "system", content: system.value }] : []),
      ...messages
        .filter((message) => !message.error)
        .map(({ role, content }) => ({ role, content })),
    ];
    if (thinking.value) body.chat_template_kwargs = { enable_thinking: thinking.value === "on" };
    if (budget.value !== "") body.max_thinking_tokens = Number(budget.value);
    if (temperature.value !== "") body.temperature = Number(temperature.value);
    if (most.value !== "") body.max_tokens = Number(most.value);
    return { body, headers: profiles.value ? { "x-steersman-profile": profiles.value } : {} };
  }
  return { element, listed, request };
}
