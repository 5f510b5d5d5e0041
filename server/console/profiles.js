// The profiles: who may use them, which policies steer them, and their limits.

import { get } from "./api.js";
import { h, title, chip, fact, number, rounded, notice, empty } from "./dom.js";
import { poll } from "./requests.js";

const limit = (value, unit = "") => (value ? `${number(value)}${unit}` : "no limit");

function chain(profile) {
  const link = (name, isShadow) => h("li", {}, h("a", { href: "#/policies" }, name), isShadow ? chip("shadow") : null);
  return h("ol", { class: "chain", "aria-label": "Chain of policies" }, profile.policies.map((name) => link(name, false)), profile.shadow.map((name) => link(name, true)));
}

function card(profile, state) {
  const { sampling, limits, params } = profile;
  const greedy = sampling && (sampling.temperature === 0 ? "greedy" : `temperature ${rounded(sampling.temperature)}, top_p ${rounded(sampling.top_p)}, top_k ${sampling.top_k || "all"}, min_p ${rounded(sampling.min_p)}`);
  const named = Object.entries(params ?? {});
  return h("section", { class: "card", "aria-labelledby": `profile-${profile.name}` },
    h("div", { class: "row" }, h("h2", { id: `profile-${profile.name}` }, profile.name),
      h("div", { class: "actions" }, profile.has_keys ? chip("own keys", "tool-call") : chip(state.access.key === "none" ? "open" : "server keys", "cancelled"),
        h("a", { class: "button", href: `#/chat/${encodeURIComponent(profile.name)}` }, "Chat with it"))),
    chain(profile),
    h("dl", { class: "facts" },
      fact("Model", profile.model ?? "–"),
      fact("A failing policy", profile.on_failure === "open" ? "is replaced (open)" : "ends the request (closed)"),
      fact("Sampling", greedy ?? "of the model"),
      fact("Traces", profile.trace_text ? "with text" : "masked"),
      fact("Reasoning tokens", limit(limits.think_budget)),
      fact("Reply tokens", limit(limits.max_tokens)),
      fact("A client's limit counts", { api: "what its API says", answer: "the answer", reply: "the whole reply" }[limits.limit_counts]),
      fact("Prompt tokens", limit(limits.prompt_tokens)),
      fact("Requests at once", limit(limits.requests)),
      profile.grants.length ? fact("Grants", profile.grants.join(", ")) : [],
      profile.mcp.length ? fact("Tools (MCP)", profile.mcp.join(", ")) : [],
      profile.upstreams.length ? fact("Upstreams", profile.upstreams.join(", ")) : [],
      profile.policy_headers.length ? fact("Headers for policies", profile.policy_headers.join(", ")) : []),
    named.length ? h("div", {}, h("h3", {}, "Parameters"), h("dl", { class: "facts" }, named.map(([name, value]) => fact(name, typeof value === "string" ? value : `file ${value.file}`)))) : null);
}

export function profiles(element, state) {
  const cards = h("div", { class: "cards" });
  element.append(title("Profiles", "A client chooses one as model@profile, with a header, or by its key. They are set in the configuration."));
  if (!state.isOperator) element.append(notice("info", h("p", {}, "Parameters of policies are shown to an operator's key.")));
  element.append(cards);
  let before = "";
  return poll(async (signal) => {
    const { profiles: all } = await get("/v1/profiles", signal);
    const now = JSON.stringify(all);
    if (now === before) return;
    before = now;
    cards.replaceChildren(...(all.length ? all.map((profile) => card(profile, state)) : [empty("No profile", "This key opens none.")]));
  }, 5000);
}
