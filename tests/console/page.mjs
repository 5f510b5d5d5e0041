// What the tests of the console share: pages of a browser, requests to the server, and what must be true of every page.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

export const ROOT = resolve(fileURLToPath(import.meta.url), "../../..");
export const BINARY = process.argv[2] ?? join(process.env.CARGO_TARGET_DIR ?? join(ROOT, "target"), "debug/steersman");
export const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
export const OPERATOR = "operator-secret-key";
export const CLIENT = "client-secret-key";
export const VIEWS = ["requests", "policies", "profiles", "models", "chat", "connect", "keys", "log"];
export const SIZES = { desk: { width: 1280, height: 800 }, phone: { width: 390, height: 844 } };
/** The bundled model loops on it; the policy `default` ends the loop. */
export const LOOP = "Optimize this SQL query: SELECT * FROM items WHERE price = 26;";
/** Milliseconds to wait for anything, on busy machines. */
export const PATIENCE = 120_000;

export const work = mkdtempSync(join(tmpdir(), "console-"));
export const pictures = resolve(process.argv[3] ?? join(work, "screenshots"));
mkdirSync(pictures, { recursive: true });

/** Starts a server with this configuration, whose files are in the folder `name`. Returns its address, and how to stop it. */
export async function start(name, config) {
  const folder = join(work, name);
  mkdirSync(folder, { recursive: true });
  const file = join(folder, "steersman.toml");
  writeFileSync(file, config);
  const server = spawn(BINARY, ["serve", "--config", file, "--data-dir", join(folder, "data")], {
    stdio: ["ignore", "pipe", "pipe"],
    // Downloads are refused without a network.
    env: { ...process.env, HF_HUB_OFFLINE: "1" },
  });
  let log = "";
  server.stderr.on("data", (data) => { log += data; });
  const stop = async () => {
    server.kill("SIGINT");
    await new Promise((done) => (server.exitCode === null ? server.once("exit", done) : done()));
  };
  for await (const line of createInterface({ input: server.stdout })) {
    const found = line.match(/at (http:\/\/\S+)\/v1/);
    if (found) return { url: found[1], stop };
  }
  throw new Error(`the server did not start:\n${log}`);
}

/** Sends a chat request; returns its reply. */
export async function ask(url, content, extra = {}, key = CLIENT) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify({ messages: [{ role: "user", content }], temperature: 0, ...extra }),
  });
  if (response.status !== 200) throw new Error(`${response.status} ${await response.text()}`);
  return extra.stream ? response : response.json();
}

/** Runs a program; returns what it prints. */
export async function run(program, args, env) {
  const child = spawn(program, args, { env, stdio: ["ignore", "pipe", "inherit"] });
  let output = "";
  child.stdout.on("data", (data) => { output += data; });
  const status = await new Promise((done, fail) => child.once("error", fail).once("close", done));
  assert.equal(status, 0, `${program} ${args.join(" ")}`);
  return output;
}

/** A page of a fresh browser context, and what went wrong in it. */
export async function open(browser, url, { size = SIZES.desk, theme = "light", key, path = "/" } = {}) {
  const context = await browser.newContext({ viewport: size, colorScheme: theme, reducedMotion: "reduce" });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  const seen = { foreign: [], errors: [], answers: [] };
  page.on("request", (request) => {
    if (!request.url().startsWith(`${url}/`) && !request.url().startsWith("data:")) seen.foreign.push(request.url());
  });
  page.on("response", (response) => seen.answers.push(`${response.status()} ${new URL(response.url()).pathname}`));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("console", (message) => {
    // Chromium reports every answer with an error status; the tests look at these themselves.
    if (message.type() === "error" && !message.text().startsWith("Failed to load resource")) seen.errors.push(message.text());
  });
  await page.goto(`${url}${path}`);
  if (key) await enter(page, key);
  return { page, seen, context };
}

export async function enter(page, key) {
  await page.fill("#key-input", key);
  await page.keyboard.press("Enter");
  await page.waitForSelector("main .view h1");
}

export async function visit(page, view) {
  await page.click(`nav a[data-view=${view}]`);
  await page.waitForSelector(`.view.${view} h1`);
}

/** Waits until `count` messages of the chat are answered; fails at once where one ends with an error. */
export async function answered(page, count) {
  await page.waitForFunction((count) => document.querySelectorAll(".message.assistant .foot a, .message.assistant .notice.bad").length >= count, count);
  assert.deepEqual(await page.locator(".message.assistant .notice.bad").allTextContents(), []);
}

/** Sends a message of the chat and waits until `count` are answered. */
export async function say(page, content, count) {
  await page.fill("#chat-input", content);
  await page.keyboard.press("Enter");
  await answered(page, count);
}

/** Answers the page's chat requests with `content`, without the server. Returns the bodies of the requests. */
export async function reply(page, content) {
  const bodies = [];
  await page.route("**/v1/chat/completions", (route) => {
    bodies.push(route.request().postDataJSON());
    const event = (choice) => `data: ${JSON.stringify({ id: "chatcmpl-1", choices: [choice] })}\n\n`;
    const text = typeof content === "function" ? content(bodies.length) : content;
    route.fulfill({ contentType: "text/event-stream", body: `${event({ delta: { content: text } })}${event({ delta: {}, finish_reason: "stop" })}data: [DONE]\n\n` });
  });
  return bodies;
}

/** What must be true of every page. */
export async function check(page, seen, name) {
  const width = await page.evaluate(() => [document.scrollingElement.scrollWidth, innerWidth]);
  assert.ok(width[0] <= width[1], `${name} is ${width[0]} pixels wide on a screen of ${width[1]}`);
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  const told = serious.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.slice(0, 4).map((node) => `${node.target} ${node.any[0]?.message ?? ""}`).join("; ")}`);
  assert.deepEqual(told, [], `axe-core on ${name}`);
  assert.deepEqual(seen.errors, [], `errors on ${name}`);
  assert.deepEqual(seen.foreign, [], `requests to other hosts on ${name}`);
}
