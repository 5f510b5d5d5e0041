#!/usr/bin/env node
// Opens the console in headless Chromium as a person does: every view, light and dark, on a desk and on a phone; swaps a
// policy and rolls it back by clicking, sends a chat, and watches a request. Fails on a request to another host, an error
// in the page, text beside the screen, and serious findings of axe-core.
//
//     npm install --prefix tests && apt-get install chromium && cargo build --bin steersman
//     node tests/console.mjs [BINARY] [FOLDER FOR SCREENSHOTS]

import assert from "node:assert/strict";
import { copyFileSync, existsSync, mkdirSync, rmSync } from "node:fs";
import { join } from "node:path";

import { chromium } from "playwright-core";

import chat from "./console/chat.mjs";
import operate from "./console/operate.mjs";
import { ROOT, OPERATOR, CLIENT, LOOP, work, pictures, ask, start } from "./console/page.mjs";
import requests, { idleServerShowsItsMemory } from "./console/requests.mjs";
import upstreams from "./console/upstreams.mjs";
import views from "./console/views.mjs";

const BROWSER = process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
/** A server is started once: what a test sends is seen by those after it. */
const TESTS = [chat, requests, operate, upstreams, views].flatMap(Object.entries);

/** Starts a server whose profile `default` has the policy `house`, a copy of `default`, with `passthrough` as its shadow. */
async function serve() {
  mkdirSync(join(work, "policies"));
  copyFileSync(join(ROOT, "policies/default/default.wasm"), join(work, "policies/house.wasm"));
  return start("main", `
[server]
port = 0
api_keys = ["${CLIENT}"]
admin_keys = ["${OPERATOR}"]
[policy]
folder = "${join(work, "policies")}"
[aliases]
"gpt-small" = "tiny-hybrid-4bit"
[models.other]
path = "owner/other-model"
[models.spare]
path = "${join(ROOT, "server/model/tiny-hybrid-4bit")}"
keep_alive_s = 600
[profiles.default]
policies = ["house"]
shadow = ["passthrough"]
[profiles.default.params]
hint_translation = "secret parameter"
[profiles.agents]
policies = ["agent", "default"]
trace_text = true
limits = { max_tokens = 2000, requests = 8 }
sampling = { temperature = 0.6, top_p = 0.95 }
`);
}

const { url, stop } = await serve();
let browser;
try {
  assert.ok(BROWSER, "no Chromium: set CHROMIUM to its path");
  // As root, Chromium has no sandbox.
  browser = await chromium.launch({ executablePath: BROWSER, args: process.getuid?.() === 0 ? ["--no-sandbox"] : [] });
  await idleServerShowsItsMemory({ browser, url });
  for (const prompt of ["What is the capital of Italy?", "What is the capital of Italy?", LOOP]) await ask(url, prompt);
  for (const [name, test] of TESTS) {
    const started = performance.now();
    await test({ browser, url });
    console.log(`ok   ${name} (${((performance.now() - started) / 1000).toFixed(1)} s)`);
  }
  console.log(`${TESTS.length} tests passed`);
} finally {
  await browser?.close();
  await stop();
  if (!pictures.startsWith(work)) console.log(`screenshots: ${pictures}`);
  rmSync(work, { recursive: true, force: true });
}
