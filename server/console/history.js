// The list of the conversations that are kept: to open, rename and delete them.

import { h, number, text, time, confirm } from "./dom.js";
import { LIMITS } from "./conversations.js";
import { transfer } from "./transfer.js";

/**
 * Returns the element, and `draw(openId)`. `open(id)` opens a conversation; `removed(id)` is called
 * after one is deleted,
 * `add(conversation)` with one that is imported, and `current()` returns the open one.
 */
export function history(store, { open, removed, add, current }) {
  const list = h("ul", { class: "kept" });
  const search = h("input", {
    type: "search",
    "aria-label": "Search conversations",
    placeholder: "Search",
    autocomplete: "off",
    spellcheck: "false",
  });
  const nothing = h("p", { class: "muted small", role: "status" });
  // All conversations are read: not at each letter.
  let typed;
  search.addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => draw(), 200);
  });
  const files = transfer(current, add);
  const foot = h("p", { class: "muted small" });
  const element = h(
    "details",
    { class: "history card", open: matchMedia("(min-width: 900px)").matches },
    h("summary", {}, "Conversations"),
    search,
    nothing,
    list,
    files.element,
    foot,
  );
  let shown = null;

  function draw(openId = shown) {
    shown = openId;
    files.draw();
    const heads = store.list();
    const found = store.find(search.value);
    search.hidden = heads.length === 0;
    list.hidden = found.length === 0;
    list.replaceChildren(...found.map((head) => item(head, head.id === shown)));
    text(nothing, heads.length && !found.length ? "No conversation has this text." : "");
    const count = `${number(heads.length)} of ${number(LIMITS.conversations)} conversations`;
    const room = `${Math.ceil((100 * store.characters()) / LIMITS.characters)} % of the room`;
    text(
      foot,
      heads.length
        ? `Kept in this browser: ${count}, ${room}. ` +
            "A new one takes the place of the oldest when there is no room."
        : "Conversations are kept in this browser, not on the server.",
    );
  }

  function item({ id, title, updated }, isOpen) {
    const name = title || "Untitled";
    const line = h(
      "li",
      { class: isOpen ? "open" : "" },
      h(
        "button",
        {
          type: "button",
          class: "name",
          "aria-current": isOpen ? "true" : null,
          title: time(updated / 1000),
          onclick: () => open(id),
        },
        name,
      ),
      h(
        "button",
        {
          type: "button",
          class: "quiet icon",
          "aria-label": `Rename ${name}`,
          title: "Rename",
          onclick: () => rename(),
        },
        "✎",
      ),
      h(
        "button",
        {
          type: "button",
          class: "quiet icon",
          "aria-label": `Delete ${name}`,
          title: "Delete",
          onclick: async () => {
            if (
              !(await confirm(
                "Delete the conversation?",
                `“${name}” is deleted from this browser for good.`,
                "Delete",
              ))
            )
              return;
            store.remove(id);
            removed(id);
            draw();
          },
        },
        "✕",
      ),
    );
    function rename() {
      const input = h("input", {
        value: title,
        maxlength: "80",
        "aria-label": `New name of ${name}`,
        onkeydown: (event) => event.key === "Escape" && draw(),
      });
      const form = h(
        "form",
        {
          class: "rename",
          onsubmit: (event) => {
            event.preventDefault();
            // The open conversation is newer than what is kept of it.
            store.rename(current().id === id ? current() : store.get(id), input.value);
            draw();
          },
        },
        input,
        h("button", { class: "quiet" }, "Save"),
      );
      line.replaceChildren(form);
      input.select();
    }
    return line;
  }
  return { element, draw };
}
