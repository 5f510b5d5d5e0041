// One message of a chat as it is shown: reasoning, text, and what it took.

import { h, notice } from "./dom.js";

/** Text with fenced code as blocks; everything else stays as it is. */
function formatted(source) {
  return source.split(/^```/m).map((part, i) => {
    if (i % 2 === 0) return part.trim() ? h("p", { class: "pre" }, part.trim()) : null;
    const [language, ...lines] = part.split("\n");
    return h("pre", { tabindex: "0", "aria-label": language.trim() ? `Code: ${language.trim()}` : "Code" }, h("code", {}, lines.join("\n").trimEnd()));
  }).filter(Boolean);
}

/** Returns the element, and `draw(isRunning)`, which shows the message as it is now. */
export function bubble(message, state) {
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
    if (message.request && !isRunning) foot.append(" ", state.isOperator ? h("a", { href: `#/requests/${encodeURIComponent(message.request)}` }, "What happened") : "");
    for (const note of isRunning ? [] : message.notes ?? []) foot.append(h("span", { class: "mark" }, note));
  };
  return { element, draw };
}
