// Keeps replies brief: limits reasoning, ends the answer at a phrase, bans a token, and repairs tool calls that
// already have a result.
//
// One instance serves one request, so these variables are the state of that request.

import { plan, reporting } from "./steersman-policy.js";

/** Limit on reasoning tokens: the parameter `budget`. */
let budget = 100;
/** Text that ends the answer: the parameter `phrase`. */
let phrase = "";
/** A token to ban from the first step on: the parameter `ban`. */
let ban;
/** The end of the answer so far, in which the phrase may begin. */
let tail = "";

/** Parses a number of up to nine digits; anything else becomes a note. */
function number(params, name, notes) {
  const text = params.get(name);
  if (text === undefined) return undefined;
  if (/^[0-9]{1,9}$/.test(text)) return Number(text);
  notes.push(`parameter \`${name}\` cannot be \`${text}\``);
  return undefined;
}

export const onRequest = {
  onRequest: reporting((request) => {
    const params = new Map(request.params);
    const notes = [];
    budget = number(params, "budget", notes) ?? budget;
    if (request.reasoningBudget !== undefined) budget = Math.min(budget, request.reasoningBudget);
    ban = number(params, "ban", notes);
    phrase = params.get("phrase") ?? "";
    return plan({
      reasoning: request.reasoning,
      reasoningBudget: budget,
      every: 8,
      note: notes.length > 0 ? notes.join("; ") : undefined,
    });
  }),
};

export const onStep = {
  onStep: reporting((step) => {
    const actions = [];
    if (ban !== undefined) {
      actions.push({ tag: "ban", val: { tokens: new Uint32Array([ban]), steps: 0 } });
      ban = undefined; // once is enough: the ban holds for the rest of the reply
    }
    if (step.phase === "reasoning" && (step.budgetReached || step.reasoningTokens >= budget)) {
      actions.push({ tag: "close-reasoning", val: "In short: " });
    }
    if (step.phase === "answer" && phrase !== "") {
      const text = tail + step.text;
      if (text.includes(phrase)) actions.push({ tag: "stop", val: `the answer contains \`${phrase}\`` });
      tail = text.slice(-phrase.length);
    }
    return actions;
  }),
};

export const onToolCall = {
  onToolCall: reporting((call) => {
    const again = call.earlier.some(
      (earlier) =>
        earlier.name === call.name && earlier.arguments === call.digest && earlier.answered !== undefined,
    );
    return again
      ? { tag: "repair", val: "I have that result already: " }
      : { tag: "accept" };
  }),
};
