// The checks of a client package: runs them against a server, as `sdk_checks.py` does.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export { assert };

/** Rounds of the longest loops of tools. */
export const ROUNDS = 20;

export const QUESTION = "What is the capital of Italy?";
export const WEATHER_QUESTION = "What is the weather in Rome?";

/** A schema whose values the bundled model need not know: the form of a strict tool leaves it a choice of two. */
export const CITY = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Paris"] } },
  required: ["city"],
  additionalProperties: false,
};

export const WEATHER = {
  name: "get_weather",
  description: "get weather",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

/** The address of the server and the key: the arguments of the command line. */
export function server() {
  const [url, key = "none"] = process.argv.slice(2);
  return { url: url.replace(/\/+$/, ""), key };
}

/** The name of the first served model. */
export async function servedModel({ url, key }) {
  const reply = await fetch(`${url}/v1/models`, { headers: { Authorization: `Bearer ${key}` } });
  return (await reply.json()).data[0].id;
}

/** Runs `checks`, functions whose names say what they check, and prints the result of each. */
export async function run(name, checks) {
  const { devDependencies } = JSON.parse(readFileSync(new URL("package.json", import.meta.url)));
  console.log(`${name} ${devDependencies[name]} of npm at ${server().url}`);
  let failures = 0;
  for (const check of checks) {
    let verdict = "ok";
    try {
      await check();
    } catch (error) {
      failures += 1;
      verdict = `FAILED\n${error.stack}`;
    }
    console.log(`  ${check.name.replaceAll("_", " ")}: ${verdict}`);
  }
  console.log(`${checks.length - failures} of ${checks.length} checks passed`);
  process.exitCode = failures ? 1 : 0;
}

/** Checks that `create` is rejected with an error of `kind`, and returns it. */
export async function rejected(kind, status, create) {
  try {
    await create();
  } catch (error) {
    assert(error instanceof kind, `${error.stack}`);
    assert.equal(error.status ?? error.statusCode, status);
    return error;
  }
  assert.fail(`no ${kind.name}`);
}
