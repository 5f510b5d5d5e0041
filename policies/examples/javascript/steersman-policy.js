// What policies in JavaScript have in common: plans with defaults, and failures that say what went wrong.

import { fail } from "steersman:policy/failure@0.6.0";

/** A plan with these fields; all other choices are the engine's. */
export const plan = (fields) => ({
  sampling: {},
  every: 0,
  checkpointEvery: 0,
  stop: [],
  onPhase: false,
  onNewline: false,
  onTexts: [],
  onTokens: new Uint32Array(),
  candidates: 0,
  watch: [],
  ...fields,
});

/** Wraps a hook so that its exceptions appear in notes and log; otherwise they are reported as a trap. */
export const reporting = (hook) => (call) => {
  try {
    return hook(call);
  } catch (error) {
    fail(`${error}\n${error.stack}`);
  }
};
