// The policies: versions, push, rollback, and what shadows would have changed.

import { get, post } from "./api.js";
import { h, title, chip, fact, bytes, time, number, count, percent, empty, notice, toast, confirm, keyed } from "./dom.js";
import { poll } from "./requests.js";
import { summary } from "./life.js";

const digest = (sha256) => h("code", { title: sha256 }, sha256 ? sha256.slice(0, 12) : "none");

function use(active, { profile, position, shadow, sha256, breaker }) {
  const health = { closed: ["healthy", "finished"], probation: [`probation, ${breaker.probation_left} left`, "prefill"], open: [`resting for ${breaker.rests_s} s`, "failed"] };
  return h("li", {}, h("a", { href: "#/profiles" }, profile), h("span", { class: "muted small" }, ` position ${position + 1}`),
    shadow ? chip("shadow") : null,
    sha256 === active ? null : h("span", { class: "small" }, "rolled back, runs ", digest(sha256)), chip(...health[breaker.state]),
    breaker.failures_in_a_row ? h("span", { class: "small bad-text" }, `${count(breaker.failures_in_a_row, "failure")} in a row`) : null);
}

function versions(policy) {
  const line = (version, label) => h("tr", {},
    h("td", { "data-label": "State" }, label), h("td", { "data-label": "Version" }, digest(version.sha256)),
    h("td", { "data-label": "Size" }, bytes(version.bytes)), h("td", { "data-label": "From" }, version.origin), h("td", { "data-label": "Since" }, time(version.since)));
  const earlier = policy.earlier.map((version) => line(version, version.withdrawn ? h("span", {}, chip("withdrawn", "failed"), h("span", { class: "muted small wrap" }, ` ${version.withdrawn}`)) : chip("earlier", "cancelled")));
  const head = ["State", "Version", "Size", "From", "Since"].map((name) => h("th", { scope: "col" }, name));
  return h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "sr" }, `Versions of ${policy.name}`), h("thead", {}, h("tr", {}, head)), h("tbody", {}, policy.sha256 ? line(policy, chip("active", "answer")) : null, earlier)));
}

/** One card. `act` runs an operation and shows the policies again. */
function card(policy, state, act) {
  const target = policy.earlier.find((version) => !version.withdrawn);
  const file = h("input", { type: "file", accept: ".wasm,.steer,application/wasm", class: "sr", id: `file-${policy.name}`, tabindex: "-1", "aria-label": `Component for ${policy.name}`,
    onchange: () => file.files[0] && act(policy, "push", file.files[0]).finally(() => { file.value = ""; }) });
  const push = h("button", { type: "button", "data-act": "push", onclick: () => file.click(),
    disabled: !state.isOperator || !policy.file }, "Push a version…");
  const back = h("button", { type: "button", "data-act": "rollback", disabled: !state.isOperator || !target,
    onclick: async () => {
      const sure = await confirm(`Roll back ${policy.name}?`, `New requests get the version ${target.sha256.slice(0, 12)} again. Running requests keep theirs.`, "Roll back");
      if (sure) act(policy, "rollback");
    } }, "Roll back");
  // Without an operator's key, the head of the page says it.
  const why = state.isOperator ? [
    !policy.file && "It is in the binary: set policy.folder to push versions of it.",
    policy.file && !target && "There is no earlier version to roll back to.",
  ].filter(Boolean) : [];
  const section = h("section", { class: "card policy", "aria-labelledby": `policy-${policy.name}` },
    h("div", { class: "row" }, h("h2", { id: `policy-${policy.name}` }, policy.name), h("div", { class: "actions" }, file, back, push)),
    why.length ? h("p", { class: "muted small" }, why.join(" ")) : null,
    policy.sha256 ? null : notice("bad", h("p", { class: "strong" }, "No version is active: it fails in every request"), h("p", {}, policy.retries ? "The server compiles it again by itself." : "Push another version, or replace its file.")),
    policy.problem && notice("bad", h("p", { class: "strong" }, `${policy.sha256 ? "The newest version was rejected" : "It did not compile"} at ${time(policy.problem.at)}`), h("pre", { tabindex: "0", "aria-label": "Reason" }, policy.problem.message)),
    h("dl", { class: "facts" }, fact("Contract", policy.contract), fact("File", policy.file ?? "in the binary"),
      fact("Hooks", policy.hooks.join(", ") || "none"), fact("Imports", policy.imports.join(", ") || "none")),
    h("ul", { class: "uses", "aria-label": "Profiles" }, policy.profiles.map((used) => use(policy.sha256, used))),
    versions(policy));
  if (policy.profiles.some((used) => used.shadow)) section.append(shadow(policy, state));
  return section;
}

/** Differences of a shadow, read when they are opened. */
function shadow(policy, state) {
  const body = h("div", {});
  const read = async () => {
    body.replaceChildren(h("p", { class: "muted" }, "Reading traces…"));
    try {
      const report = await get(`/v1/policies/${encodeURIComponent(policy.name)}/shadow`);
      const { requests, calls, differing, failures, differences } = report;
      const line = ({ shadow: mine, applied }) => h("li", {},
        h("p", {}, h("a", { href: `#/requests/${encodeURIComponent(mine.request)}` }, mine.request.slice(0, 18)), " ", h("span", { class: "mono small" }, mine.hook), mine.step !== undefined ? h("span", { class: "muted small" }, ` call ${mine.step}`) : null),
        h("dl", { class: "versus" }, fact("Shadow", summary(mine)), fact("Applied", applied.map((record) => `${record.policy}: ${summary(record)}`).join("; ") || "nothing")));
      body.replaceChildren(
        h("p", {}, h("span", { class: "strong" }, `${number(differing)} of ${number(calls)} answers differ`), ` (${percent(differing, calls)}) in ${count(requests, "request")}; ${count(failures, "failure")}.`),
        differences.length ? h("ol", { class: "records" }, differences.map(line)) : h("p", { class: "muted" }, "The shadow would have changed nothing in the requests in memory."));
    } catch (error) {
      body.replaceChildren(notice("bad", h("p", {}, error.message)));
    }
  };
  const details = h("details", { class: "shadow-report", ontoggle: () => details.open && state.isOperator && read() },
    h("summary", {}, "Shadow: what it would have changed"),
    state.isOperator ? body : h("p", { class: "muted" }, "Shown to an operator's key."));
  return details;
}

export function policies(element, state) {
  const cards = h("div", { class: "cards" });
  const params = h("div");
  const parts = [title("Policies", "Versions that are active, and those before them.")];
  if (!state.isOperator) {
    parts.push(notice("info", h("p", {}, state.access.operators ? "Pushing and rolling back need an operator's key." : "Pushing and rolling back need an operator's key: set server.admin_keys.")));
  }
  element.append(...parts, cards, params);

  const act = async (policy, what, file) => {
    const path = `/v1/policies/${encodeURIComponent(policy.name)}`;
    try {
      const done = what === "push" ? await post(path, file, "application/wasm") : await post(`${path}/rollback`);
      toast(done.changed ? `${policy.name}: version ${done.sha256.slice(0, 12)} is active` : `${policy.name}: this version was active already`);
    } catch (error) {
      toast(`${policy.name}: ${error.message}`, "bad");
    }
    await refresh();
  };

  async function refresh(signal) {
    const report = await get("/v1/policies", signal);
    // A breaker counts seconds: a card is made again only if it shows something else, so that what is open stays open.
    keyed(cards, report.policies, (policy) => JSON.stringify(policy), (policy) => card(policy, state, act), () => {});
    if (!report.policies.length) cards.replaceChildren(empty("No policy", "The profiles of this key name none."));
    params.replaceChildren(...(report.params.length ? [h("section", { class: "card" }, h("h2", {}, "Parameters"), h("ul", { class: "uses" }, report.params.map((param) =>
      h("li", {}, h("span", { class: "strong" }, `${param.profile}: ${param.param}`), h("code", {}, param.file ?? "in the configuration"), param.problem ? h("span", { class: "bad-text" }, param.problem.message) : chip("read", "finished")))))] : []));
  }
  return poll(refresh, 2000);
}
