// Conversations as files: Markdown for people, JSON for this console and programs.

import { h, toast } from "./dom.js";
import { Conversation } from "./conversation.js";
import { LIMITS } from "./conversations.js";

/** The messages that are shown, without reasoning. */
function markdown(conversation) {
  const parts = conversation
    .path()
    .map(
      ({ role, model, content }) =>
        `## ${role === "user" ? "You" : (model ?? "Model")}\n\n${content}\n`,
    );
  return [`# ${conversation.title || "Conversation"}\n`, ...parts].join("\n");
}

function download(conversation, ending, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const name =
    conversation.title
      .replace(/[^\p{L}\p{N}]+/gu, "-")
      .replace(/^-|-$/g, "")
      .slice(0, 40) || "conversation";
  h("a", { href: address, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function read(file) {
  if (file.size > 4 * LIMITS.characters)
    throw new Error("the file is longer than any conversation that is kept");
  return Conversation.parse(await file.text());
}

/**
 * Returns buttons that export `current()` and that import a conversation, which `add` gets;
 * `draw()` disables those that have nothing to export.
 */
export function transfer(current, add) {
  const file = h("input", {
    type: "file",
    accept: ".json,application/json",
    class: "sr",
    tabindex: "-1",
    "aria-label": "Conversation to import",
    onchange: async () => {
      try {
        // A copy: it takes the place of no other conversation.
        add(
          new Conversation({ ...(await read(file.files[0])), id: undefined, updated: Date.now() }),
        );
      } catch (error) {
        toast(`Not imported: ${error.message}`, "bad");
      }
      file.value = "";
    },
  });
  const button = (label, act) =>
    h("button", { type: "button", class: "quiet", onclick: act }, label);
  const exports = [
    button("Export Markdown", () =>
      download(current(), "md", "text/markdown", markdown(current())),
    ),
    button("Export JSON", () =>
      download(current(), "json", "application/json", JSON.stringify(current(), null, 1)),
    ),
  ];
  const element = h(
    "div",
    { class: "acts" },
    exports,
    button("Import…", () => file.click()),
    file,
  );
  const draw = () =>
    exports.forEach((one) => {
      one.disabled = current().messages.length === 0;
    });
  return { element, draw };
}
