// Closes reasoning that becomes long.
//
// One instance serves one request, so variables of this module are the state of that request.

import { plan, reporting } from "./steersman-policy.js";

/** Limit on reasoning tokens. */
const REASONING_TOKENS = 1024;

// A hook is called if wit/world.wit exports it.

export const onRequest = {
  onRequest: reporting((request) => plan({ reasoning: request.reasoning, every: 16 })),
};

export const onStep = {
  onStep: reporting((step) => {
    if (step.phase === "reasoning" && step.reasoningTokens >= REASONING_TOKENS) {
      return [{ tag: "close-reasoning", val: "In short: " }];
    }
    return [];
  }),
};
