// Models on the hub, by words of their names, for operators.

import { get } from "./api.js";
import { h, bytes, empty, notice, number } from "./dom.js";

const COLUMNS = ["Model", "Size", "Family", "Weights", "Fits", "Downloads"];

/** Whether this machine can serve a model. */
function verdict({ supported, fits }) {
  if (supported === false) return "not supported";
  if (fits === null) return "–";
  return fits ? "yes" : "no";
}

function row(found, download) {
  const { model, bytes: size, family, weights, downloads } = found;
  const values = [
    model,
    size === null ? "–" : bytes(size),
    family ?? "–",
    weights ?? "–",
    verdict(found),
    number(downloads),
  ];
  const button = h(
    "button",
    {
      type: "button",
      "aria-label": `Download ${model}`,
      disabled: found.supported === false,
      onclick: () => download(model),
    },
    "Download",
  );
  return h(
    "tr",
    {},
    values.map((value, i) => h("td", { "data-label": COLUMNS[i], class: i ? "" : "wrap" }, value)),
    h("td", { "data-label": "" }, button),
  );
}

/** The form that searches the hub, and what it has found, which `download(model)` downloads. */
export function search(download) {
  const input = h("input", {
    id: "words",
    type: "search",
    placeholder: "qwen3 4bit",
    required: true,
    maxlength: "200",
    autocomplete: "off",
    spellcheck: "false",
  });
  const button = h("button", {}, "Search");
  const problem = h("div", { role: "status" });
  const none = empty("Nothing found", "The hub has no model with these words in its name.");
  none.hidden = true;
  const body = h("tbody");
  const heads = [...COLUMNS, h("span", { class: "sr" }, "Action")];
  const table = h(
    "div",
    { class: "scroll", hidden: true },
    h(
      "table",
      {},
      h("caption", { class: "sr" }, "Models on the hub"),
      h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
      body,
    ),
  );

  async function submit(event) {
    event.preventDefault();
    button.disabled = true;
    let found = null;
    try {
      found = (await get(`/v1/search?words=${encodeURIComponent(input.value.trim())}`)).models;
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(notice("bad", h("p", {}, error.message)));
    }
    body.replaceChildren(...(found ?? []).map((model) => row(model, download)));
    table.hidden = !found?.length;
    none.hidden = found?.length !== 0;
    button.disabled = false;
  }

  return h(
    "section",
    { class: "card", "aria-labelledby": "search-title" },
    h("h2", { id: "search-title" }, "Search the hub"),
    h(
      "form",
      { class: "inline", onsubmit: submit },
      h("label", { for: "words" }, "Words of the name"),
      h("div", { class: "row" }, input, button),
    ),
    problem,
    none,
    table,
  );
}
