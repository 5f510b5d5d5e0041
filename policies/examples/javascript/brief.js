// Keeps replies brief: short thoughts, an answer that ends at a phrase, a token that is never drawn, no tool called
// twice for the same.
//
// One instance lives as long as one request, so these variables are that request's state.

import { fail } from "steersman:policy/failure@0.2.0";

/** A hook whose exceptions are told in notes and log; without this a failure is a bare trap. */
const told = (hook) => (asked) => {
  try {
    return hook(asked);
  } catch (error) {
    fail(`${error}\n${error.stack}`);
  }
};

/** Most tokens of a thought: the parameter `budget`. */
let budget = 100;
/** The answer ends where it says this: the parameter `phrase`. */
let phrase = "";
/** A token that is not drawn, from the first step on: the parameter `ban`. */
let ban;
/** The end of the answer so far, in which a phrase may have begun. */
let tail = "";

/** Whole numbers of up to nine digits; what else a parameter says is told in the reply's notes. */
function number(params, name, notes) {
  const text = params.get(name);
  if (text === undefined) return undefined;
  if (/^[0-9]{1,9}$/.test(text)) return Number(text);
  notes.push(`parameter \`${name}\` cannot be \`${text}\``);
  return undefined;
}

export const onRequest = {
  onRequest: told((request) => {
    const params = new Map(request.params);
    const notes = [];
    budget = number(params, "budget", notes) ?? budget;
    if (request.thinkBudget !== undefined) budget = Math.min(budget, request.thinkBudget);
    ban = number(params, "ban", notes);
    phrase = params.get("phrase") ?? "";
    return {
      thinking: request.thinking,
      thinkBudget: budget,
      sampling: {},
      every: 8,
      checkpointEvery: 0,
      note: notes.length > 0 ? notes.join("; ") : undefined,
    };
  }),
};

export const onStep = {
  onStep: told((step) => {
    const actions = [];
    if (ban !== undefined) {
      actions.push({ tag: "ban", val: { tokens: new Uint32Array([ban]), steps: 0 } });
      ban = undefined; // once is enough: it holds for the rest of the reply
    }
    if (step.phase === "think" && (step.budgetReached || step.thinkTokens >= budget)) {
      actions.push({ tag: "close-thinking", val: "In short: " });
    }
    if (step.phase === "answer" && phrase !== "") {
      const text = tail + step.text;
      if (text.includes(phrase)) actions.push({ tag: "stop", val: `the answer says \`${phrase}\`` });
      tail = text.slice(-phrase.length);
    }
    return actions;
  }),
};

export const onToolCall = {
  onToolCall: told((call) => {
    const again = call.earlier.some(
      (earlier) =>
        earlier.name === call.name && earlier.arguments === call.digest && earlier.answered !== undefined,
    );
    return again
      ? { tag: "repair", val: "I have that result already: " }
      : { tag: "accept" };
  }),
};
