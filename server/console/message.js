// One message of a chat as it is shown: reasoning, text, and what it took.

import { h, copyButton, notice } from "./dom.js";
import { blocks } from "./markdown.js";

/** Returns controls that step between the versions of a message, of which it is number `place`. */
function steps(place, count, step) {
  const button = (label, by, sign) =>
    h(
      "button",
      {
        type: "button",
        class: `quiet icon ${by < 0 ? "previous" : "next"}`,
        "aria-label": label,
        title: label,
        disabled: place + by < 0 || place + by >= count,
        onclick: () => step(by),
      },
      sign,
    );
  return [
    button("Previous version", -1, "‹"),
    h(
      "span",
      { class: "muted small", "aria-label": `Version ${place + 1} of ${count}`, role: "img" },
      `${place + 1}/${count}`,
    ),
    button("Next version", 1, "›"),
  ];
}

/**
 * Returns the element, and `draw(isRunning)`, which shows the message as it is now. `versions` are
 * its siblings and itself.
 * `acts`: `choose(message, by)` shows another version, `edit(message, content)` and
 * `regenerate(message)` make one.
 */
export function bubble(message, state, versions, acts) {
  const body = h("div", { class: "body" });
  const thoughts = h("p", { class: "pre" });
  const reasoning = h("details", { class: "thoughts" }, h("summary", {}, "Reasoning"), thoughts);
  const foot = h("p", { class: "foot muted small" });
  const element = h(
    "div",
    { class: `message ${message.role}` },
    h("p", { class: "who" }, message.role === "user" ? "You" : (message.model ?? "Model")),
  );
  if (message.role === "assistant") element.append(reasoning);
  const place = versions.indexOf(message);
  const act = (label, work) =>
    h("button", { type: "button", class: "quiet", onclick: work }, label);
  const row = h(
    "div",
    { class: "acts" },
    versions.length > 1
      ? steps(place, versions.length, (by) => acts.choose(versions[place + by], by))
      : null,
    copyButton(() => message.content, "the message"),
    message.role === "user" ? act("Edit", edit) : act("Regenerate", () => acts.regenerate(message)),
  );
  element.append(body, foot, row);

  function edit() {
    const input = h("textarea", {
      rows: "3",
      "aria-label": "Edited message",
      value: message.content,
    });
    const send = () => input.value.trim() && acts.edit(message, input.value.trim());
    const cancel = () => {
      draw(false);
      row.querySelector("button:last-child").focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    row.hidden = true;
    body.replaceChildren(
      h(
        "div",
        { class: "edit" },
        input,
        h(
          "div",
          { class: "actions" },
          h("button", { type: "button", class: "primary", onclick: send }, "Send"),
          act("Cancel", cancel),
        ),
      ),
    );
    input.focus();
  }

  const cursor = h("span", { class: "cursor" });
  let shown = [];
  /**
   * Shows the reply; blocks that are as before keep their elements, and what is selected in them.
   */
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
    row.hidden = isRunning;
    if (message.error) body.append(notice("bad", h("p", {}, message.error)));
    foot.replaceChildren(message.foot ?? "");
    if (message.request && !isRunning)
      foot.append(
        " ",
        state.isOperator
          ? h("a", { href: `#/requests/${encodeURIComponent(message.request)}` }, "What happened")
          : "",
      );
    for (const note of isRunning ? [] : (message.notes ?? []))
      foot.append(h("span", { class: "mark" }, note));
  };
  return { element, draw };
}
