// One message of a chat as it is shown: reasoning, text, and what it took.

import { h, copyButton, notice } from "./dom.js";
import { blocks } from "./markdown.js";

/** Returns the element, and `draw(isRunning)`, which shows the message as it is now. */
export function bubble(message, state) {
  const body = h("div", { class: "body" });
  const thoughts = h("p", { class: "pre" });
  const reasoning = h("details", { class: "thoughts" }, h("summary", {}, "Reasoning"), thoughts);
  const foot = h("p", { class: "foot muted small" });
  const element = h("div", { class: `message ${message.role}` }, h("p", { class: "who" }, message.role === "user" ? "You" : message.model ?? "Model"));
  if (message.role === "assistant") element.append(reasoning);
  const acts = h("div", { class: "acts" }, copyButton(() => message.content, "the message"));
  element.append(body, foot, acts);
  const cursor = h("span", { class: "cursor" });
  let shown = [];
  /** Shows the reply; blocks that are as before keep their elements, and what is selected in them. */
  function drawReply() {
    const next = blocks(message.content);
    const changed = next.findIndex(({ key }, i) => key !== shown[i]?.key);
    const same = changed < 0 ? next.length : changed;
    [...body.children].slice(same).forEach((child) => child.remove());
    body.append(...next.slice(same).map(({ make }) => make()));
    shown = next;
  }
  const draw = (isRunning) => {
    reasoning.hidden = !message.reasoning;
    if (isRunning) reasoning.open = message.content === "";
    thoughts.textContent = message.reasoning ?? "";
    if (message.role === "user") body.replaceChildren(h("p", { class: "pre" }, message.content));
    else drawReply();
    if (isRunning) body.append(cursor);
    acts.hidden = isRunning;
    if (message.error) body.append(notice("bad", h("p", {}, message.error)));
    foot.replaceChildren(message.foot ?? "");
    if (message.request && !isRunning) foot.append(" ", state.isOperator ? h("a", { href: `#/requests/${encodeURIComponent(message.request)}` }, "What happened") : "");
    for (const note of isRunning ? [] : message.notes ?? []) foot.append(h("span", { class: "mark" }, note));
  };
  return { element, draw };
}
