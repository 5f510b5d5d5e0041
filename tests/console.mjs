#!/usr/bin/env node
// Opens the console in headless Chromium as a person does: every view, light and dark, on a desk and on a phone; swaps a
// policy and rolls it back by clicking, sends a chat, and watches a request. Fails on a request to another host, an error
// in the page, text beside the screen, and serious findings of axe-core.
//
//     npm install --prefix tests && apt-get install chromium && cargo build --bin steersman
//     node tests/console.mjs [BINARY] [FOLDER FOR SCREENSHOTS]

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { chmodSync, copyFileSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { createInterface } from "node:readline";

import { chromium } from "playwright-core";

const ROOT = resolve(fileURLToPath(import.meta.url), "../..");
const BINARY = process.argv[2] ?? join(process.env.CARGO_TARGET_DIR ?? join(ROOT, "target"), "debug/steersman");
const BROWSER = process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const OPERATOR = "operator-secret-key";
const CLIENT = "client-secret-key";
const VIEWS = ["requests", "policies", "profiles", "models", "chat", "connect", "keys", "log"];
const SIZES = { desk: { width: 1280, height: 800 }, phone: { width: 390, height: 844 } };
/** The bundled model loops on it; the policy `default` ends the loop. */
const LOOP = "Optimize this SQL query: SELECT * FROM items WHERE price = 26;";
/** A reply with everything of Markdown that is shown as such, and what only looks like it. */
const MARKDOWN = `# Final SQL
It does **one scan**, which is *fast* and _really_ short: \`price\` has an index.

\`\`\`sql
SELECT *
  FROM items; -- **not bold**
\`\`\`

## Why
1. First
   - nested
2. Second

| name | rows |
| :--- | ---: |
| items | 26 |

> A quote.

---
See [the manual](https://example.org/manual "Manual"), or https://example.org/a_b_(c).

snake_case_name, 2 * 3 * 4, [no](javascript:alert(1)), <b>no</b>, C:\\new`;
/** Python's classes of clients, which print what they are called with: the packages are tested by tests/*_client.py. */
const CLASSES = `
import atexit, json
calls = []
atexit.register(lambda: print("\\n" + json.dumps(calls)))
class Class:
    def __init__(self, name):
        self.name = name
    def __getattr__(self, name):
        return Class(f"{self.name}.{name}")
    def __getitem__(self, index):
        return Class(f"{self.name}[{index}]")
    def __iter__(self):
        return iter([])
    def __call__(self, *args, **options):
        calls.append([self.name, list(args), options])
        return Class(f"{self.name}()")
OpenAI, Anthropic, Client, ChatOpenAI = map(Class, ["OpenAI", "Anthropic", "Client", "ChatOpenAI"])
`;
const MESSAGES = [{ role: "user", content: "What is the capital of Italy?" }];
/** What the settings for each package of Python call. */
const EXPECTED_CALLS = {
  openai: (url) => [["OpenAI", [], { base_url: `${url}/v1`, api_key: CLIENT }], ["OpenAI().chat.completions.create", [], { model: "gpt-small", messages: MESSAGES }]],
  anthropic: (url) => [["Anthropic", [], { base_url: url, api_key: CLIENT }], ["Anthropic().messages.create", [], { model: "gpt-small", max_tokens: 1000, messages: MESSAGES }]],
  ollama: (url) => [["Client", [url], { headers: { Authorization: `Bearer ${CLIENT}` } }], ["Client().chat", [], { model: "gpt-small", messages: MESSAGES }]],
  langchain_openai: (url) => [["ChatOpenAI", [], { model: "gpt-small", base_url: `${url}/v1`, api_key: CLIENT }], ["ChatOpenAI().invoke", [MESSAGES[0].content], {}]],
};
/** Milliseconds to wait for anything, on busy machines. */
const PATIENCE = 120_000;

const work = mkdtempSync(join(tmpdir(), "console-"));
const pictures = resolve(process.argv[3] ?? join(work, "screenshots"));
mkdirSync(pictures, { recursive: true });

/** Starts a server whose profile `default` has the policy `house`, a copy of `default`, with `passthrough` as its shadow. */
async function serve() {
  mkdirSync(join(work, "policies"));
  copyFileSync(join(ROOT, "policies/default/default.wasm"), join(work, "policies/house.wasm"));
  const config = join(work, "steersman.toml");
  writeFileSync(config, `
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
  const server = spawn(BINARY, ["serve", "--config", config, "--data-dir", join(work, "data")], {
    stdio: ["ignore", "pipe", "pipe"],
    // Downloads are refused without a network.
    env: { ...process.env, HF_HUB_OFFLINE: "1" },
  });
  let log = "";
  server.stderr.on("data", (data) => { log += data; });
  for await (const line of createInterface({ input: server.stdout })) {
    const found = line.match(/at (http:\/\/\S+)\/v1/);
    if (found) return { server, url: found[1] };
  }
  throw new Error(`the server did not start:\n${log}`);
}

/** Starts a server without keys in a terminal, as its owner does. Returns its address, the link that it prints, and how to stop it. */
async function serveInTerminal() {
  const program = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))";
  const server = spawn("python3", ["-c", program, BINARY, "serve", "--port", "0", "--data-dir", join(work, "own")], {
    stdio: ["pipe", "pipe", "inherit"],
    env: { ...process.env, HF_HUB_OFFLINE: "1" },
  });
  const ended = new Promise((done) => server.once("exit", done));
  const stop = () => {
    server.stdin.write("\x03");
    return ended;
  };
  let log = "";
  for await (const line of createInterface({ input: server.stdout })) {
    log += `${line}\n`;
    const [, url, path] = line.match(/(http:\/\/[^\s/]+)(\/#\/enter\/[\w-]+)/) ?? [];
    if (!path) continue;
    server.stdout.resume();
    return { url, path, stop };
  }
  throw new Error(`the server did not start:\n${log}`);
}

/** Sends a chat request; returns its reply. */
async function ask(url, content, extra = {}) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${CLIENT}` },
    body: JSON.stringify({ messages: [{ role: "user", content }], temperature: 0, ...extra }),
  });
  if (response.status !== 200) throw new Error(`${response.status} ${await response.text()}`);
  return extra.stream ? response : response.json();
}

/** Runs a program; returns what it prints. */
async function run(program, args, env) {
  const child = spawn(program, args, { env, stdio: ["ignore", "pipe", "inherit"] });
  let output = "";
  child.stdout.on("data", (data) => { output += data; });
  const status = await new Promise((done, fail) => child.once("error", fail).once("close", done));
  assert.equal(status, 0, `${program} ${args.join(" ")}`);
  return output;
}

/** A page of a fresh browser context, and what went wrong in it. */
async function open(browser, url, { size = SIZES.desk, theme = "light", key, path = "/" } = {}) {
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

async function enter(page, key) {
  await page.fill("#key-input", key);
  await page.keyboard.press("Enter");
  await page.waitForSelector("main .view h1");
}

async function visit(page, view) {
  await page.click(`nav a[data-view=${view}]`);
  await page.waitForSelector(`.view.${view} h1`);
}

/** Waits until `count` messages of the chat are answered; fails at once where one ends with an error. */
async function answered(page, count) {
  await page.waitForFunction((count) => document.querySelectorAll(".message.assistant .foot a, .message.assistant .notice.bad").length >= count, count);
  assert.deepEqual(await page.locator(".message.assistant .notice.bad").allTextContents(), []);
}

/** Sends a message of the chat and waits until `count` are answered. */
async function say(page, content, count) {
  await page.fill("#chat-input", content);
  await page.keyboard.press("Enter");
  await answered(page, count);
}

/** Answers the page's chat requests with `content`, without the server. Returns the bodies of the requests. */
async function reply(page, content) {
  const bodies = [];
  await page.route("**/v1/chat/completions", (route) => {
    bodies.push(route.request().postDataJSON());
    const event = (choice) => `data: ${JSON.stringify({ id: "chatcmpl-1", choices: [choice] })}\n\n`;
    const text = typeof content === "function" ? content(bodies.length) : content;
    route.fulfill({ contentType: "text/event-stream", body: `${event({ delta: { content: text } })}${event({ delta: {}, finish_reason: "stop" })}data: [DONE]\n\n` });
  });
  return bodies;
}

/** Bytes of the first size in a text, as `1.5 MiB`. */
function size(text) {
  const [, value, unit] = text.match(/([\d.]+) ([KMG]?i?B)/);
  return value * 1024 ** ["B", "KiB", "MiB", "GiB"].indexOf(unit);
}

/** What must be true of every page. */
async function check(page, seen, name) {
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

/** Before the server has answered a request: arrays are counted after the first pass, and accounts from the start. */
async function idleServerShowsItsMemory({ browser, url }) {
  const { page, seen, context } = await open(browser, url, { key: OPERATOR });
  await page.waitForSelector(".empty:has-text('No requests are running'):visible");
  await page.waitForSelector("#running-more:text-is('the server is idle')");
  const [{ bytes }] = (await (await fetch(`${url}/health`)).json()).engines;
  assert.ok(!bytes.arrays && bytes.weights > 1_000_000, JSON.stringify(bytes));
  const shown = await page.textContent("#memory");
  assert.ok(size(shown) > 0.9 * bytes.weights, shown);
  await check(page, seen, "an idle server");
  await context.close();
}

const TESTS = {
  async "the link that a server prints makes its owner an operator, once"({ browser }) {
    const own = await serveInTerminal();
    try {
      const { page, seen, context } = await open(browser, own.url, { path: own.path });
      const is = (page, words) => page.waitForFunction((words) => document.querySelector("#connection").textContent === words, words);
      await is(page, "Operator");
      assert.equal(page.url(), `${own.url}/#/requests`);
      assert.ok(!(await page.evaluate(() => document.documentElement.outerHTML)).includes(own.path.split("/").at(-1)));
      await page.reload();
      await is(page, "Operator");
      await visit(page, "keys");
      await page.waitForSelector("#key-name");
      await check(page, seen, "the console of its owner");
      // Others are no operators, and the link does not work again.
      const other = await open(browser, own.url);
      await is(other.page, "No key");
      await other.page.goto(`${own.url}${own.path}`);
      await other.page.waitForSelector("#key-problem:visible");
      assert.match(await other.page.textContent("#key-problem"), /link/);
      await is(other.page, "No key");
      await check(other.page, other.seen, "a link that was used");
      await Promise.all([context.close(), other.context.close()]);
    } finally {
      await own.stop();
    }
  },

  async "nothing is shown without a key"({ browser, url }) {
    const { page, seen, context } = await open(browser, url);
    await page.waitForSelector("#key-dialog[open]");
    await check(page, seen, "the question for a key");
    await page.screenshot({ path: join(pictures, "locked.png") });
    for (const view of VIEWS) await page.evaluate((name) => { location.hash = `#/${name}`; }, view);
    await page.fill("#key-input", "wrong");
    await page.keyboard.press("Enter");
    await page.waitForSelector("#key-problem:not([hidden])");
    const shown = await page.evaluate(() => document.documentElement.outerHTML);
    for (const secret of ["tiny-hybrid", "house", "agents", "secret parameter", "Rome"]) assert.ok(!shown.includes(secret), secret);
    const data = seen.answers.filter((answer) => !/ \/(console\/[a-z.]+)?$/.test(answer));
    assert.ok(data.length > 0 && data.every((answer) => answer === "401 /v1/profiles"), data.join(", "));
    await context.close();
  },

  async "a client's key shows numbers only"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: CLIENT });
    await page.waitForSelector(".requests-table tbody tr");
    assert.equal(await page.locator(".requests-table a").count(), 0);
    await visit(page, "policies");
    await page.waitForSelector("#policy-house");
    assert.equal(await page.locator("[data-act]:enabled").count(), 0);
    await visit(page, "profiles");
    await page.waitForSelector("#profile-agents");
    assert.ok(!(await page.textContent("main")).includes("secret parameter"));
    await check(page, seen, "a client's profiles");
    await context.close();
  },

  async "a chat is answered, and its reasoning can be turned off"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "chat");
    await page.fill("#chat-temperature", "0");
    await page.fill("#chat-input", "What is the capital of Italy?");
    await page.keyboard.press("Enter");
    await answered(page, 1);
    assert.ok((await page.textContent(".message.assistant .body")).includes("Rome"));
    assert.ok((await page.textContent(".message.assistant .foot")).includes("tokens/s"));
    await page.selectOption("#chat-thinking", "off");
    await page.selectOption("#chat-profile", "agents");
    await page.fill("#chat-input", "What is the capital of Peru?");
    await page.click("#chat-send");
    await answered(page, 2);
    assert.ok(await page.locator(".message.assistant .thoughts").nth(1).isHidden());
    await check(page, seen, "the chat");
    await page.screenshot({ path: join(pictures, "chat-answered.png") });
    await context.close();
  },

  async "a message that is sent before the models are listed goes to one of them"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    let list;
    const asked = new Promise((resolve) => { list = resolve; });
    await page.route("**/v1/models", async (route) => { await asked; await route.continue(); });
    await visit(page, "chat");
    await page.fill("#chat-input", "What is the capital of Italy?");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".message.user");
    assert.ok(!seen.answers.some((answer) => answer.endsWith("/v1/chat/completions")));
    list();
    await answered(page, 1);
    assert.ok((await page.textContent(".message.assistant .body")).includes("Rome"));
    await check(page, seen, "a chat that began early");
    await context.close();
  },

  async "conversations stay, are renamed and deleted, and belong to a key's access"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "chat");
    await say(page, "What is the capital of Italy?", 1);
    await page.reload();
    await page.waitForSelector(".message.assistant .foot");
    assert.ok((await page.textContent(".message.assistant .body")).includes("Rome"));
    await page.click("text=New chat");
    await say(page, "What is the capital of Peru?", 1);
    assert.deepEqual(await page.locator(".kept .name").allTextContents(), ["What is the capital of Peru?", "What is the capital of Italy?"]);
    await page.click("[aria-label='Rename What is the capital of Italy?']");
    await page.keyboard.type("Rome");
    await page.keyboard.press("Enter");
    await page.click(".kept .name:text-is('Rome')");
    assert.equal(await page.textContent(".message.user .body"), "What is the capital of Italy?");
    await check(page, seen, "conversations that are kept");
    await page.screenshot({ path: join(pictures, "chat-kept.png") });
    // What another tab keeps appears here.
    const other = await context.newPage();
    await other.goto(`${url}/#/chat`);
    await enter(other, OPERATOR);
    await say(other, "What is the capital of Cuba?", 1);
    await page.waitForSelector(".kept .name:text-is('What is the capital of Cuba?')");
    // The one that is open keeps its new name when it goes on.
    await page.click("[aria-label='Rename Rome']");
    await page.keyboard.type("Capitals");
    await page.keyboard.press("Enter");
    await say(page, "What is the capital of France?", 2);
    assert.equal(await page.textContent(".kept .open .name"), "Capitals");
    await page.click("[aria-label='Delete Capitals']");
    await page.click("#confirm-yes");
    await page.waitForSelector(".message", { state: "detached" });
    await page.reload();
    await page.waitForSelector(".kept .name");
    assert.equal(await page.locator(".kept .name").count(), 2);
    // Another key in the same browser has its own.
    await page.click("#key");
    await enter(page, CLIENT);
    await page.waitForFunction(() => document.querySelector("#connection").textContent === "All profiles");
    await page.waitForSelector(".view.chat h1");
    assert.equal(await page.locator(".kept .name, .message").count(), 0);
    assert.ok(!(await page.textContent("main")).includes("Peru"));
    await context.close();
  },

  async "at the limit the oldest conversations are deleted, and it is said"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await page.evaluate(() => {
      for (let i = 0; i < 200; i += 1) {
        const id = i.toString(16).padStart(16, "0");
        const messages = [{ id: "a", parent: null, role: "user", content: `old ${i}`, notes: [] }];
        localStorage.setItem(`steersman-chat/operator/${id}`, JSON.stringify({ format: "steersman-conversation", version: 1, id, title: `old ${i}`, updated: i + 1, tip: "a", messages }));
      }
      // What is damaged is not listed, and breaks nothing.
      localStorage.setItem("steersman-chat/operator/damaged", "{");
    });
    await visit(page, "chat");
    assert.ok((await page.textContent(".history")).includes("200 of 200 conversations"));
    await page.fill("#chat-input", "What is the capital of Italy?");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".toast:text('Deleted to make room: “old 0”')");
    await answered(page, 1);
    assert.equal(await page.locator(".kept .name").count(), 200);
    assert.equal(await page.locator(".kept .name:text-is('old 0')").count(), 0);
    await check(page, seen, "conversations at the limit");
    await context.close();
  },

  async "a browser that keeps nothing says so once, and the chat works"({ browser, url }) {
    for (const refuse of [
      () => Object.defineProperty(window, "localStorage", { get() { throw new DOMException("denied", "SecurityError"); } }),
      () => {
        const { setItem } = Storage.prototype;
        Storage.prototype.setItem = function full(name, value) {
          if (this === localStorage) throw new DOMException(name, "QuotaExceededError");
          setItem.call(this, name, value);
        };
      },
    ]) {
      const { page, seen, context } = await open(browser, url);
      await page.addInitScript(refuse);
      await page.reload();
      await enter(page, OPERATOR);
      await visit(page, "chat");
      await say(page, "What is the capital of Italy?", 1);
      await say(page, "What is the capital of Peru?", 2);
      assert.equal(await page.locator(".problems .notice").count(), 1);
      assert.ok((await page.textContent(".problems")).includes("end with this page"));
      await visit(page, "models");
      await visit(page, "chat");
      assert.equal(await page.locator(".message").count(), 4);
      assert.equal(await page.locator(".problems .notice").count(), 0);
      await check(page, seen, "a chat that is not kept");
      await context.close();
    }
  },

  async "replies in Markdown are shown as such, and are copied"({ browser, url }) {
    for (const [device, size] of Object.entries(SIZES)) {
      const { page, seen, context } = await open(browser, url, { size, key: OPERATOR });
      await context.grantPermissions(["clipboard-read", "clipboard-write"]);
      await reply(page, MARKDOWN);
      await visit(page, "chat");
      await say(page, "Is **this** kept as it is?", 1);
      assert.equal(await page.textContent(".message.user .body"), "Is **this** kept as it is?");
      const shown = page.locator(".message.assistant .body");
      const texts = (path) => shown.locator(path).allTextContents();
      assert.deepEqual(await texts("h3, h4"), ["Final SQL", "Why"]);
      assert.deepEqual(await texts("strong"), ["one scan"]);
      assert.deepEqual(await texts("em"), ["fast", "really"]);
      assert.deepEqual(await texts("p > code"), ["price"]);
      assert.deepEqual(await texts("pre code"), ["SELECT *\n  FROM items; -- **not bold**"]);
      assert.deepEqual(await texts("ol > li > p"), ["First", "Second"]);
      assert.deepEqual(await texts("ol ul > li"), ["nested"]);
      assert.deepEqual(await texts("th, td"), ["name", "rows", "items", "26"]);
      assert.deepEqual(await texts("blockquote"), ["A quote."]);
      assert.deepEqual(await texts("a"), ["the manual", "https://example.org/a_b_(c)"]);
      for (const link of await shown.locator("a").all()) {
        assert.deepEqual([await link.getAttribute("target"), await link.getAttribute("rel")], ["_blank", "noopener noreferrer"]);
      }
      const plain = "snake_case_name, 2 * 3 * 4, [no](javascript:alert(1)), <b>no</b>, C:\\new";
      assert.ok((await texts("p.pre")).includes(plain), JSON.stringify(await texts("p.pre")));
      const copied = () => page.evaluate(() => navigator.clipboard.readText());
      await shown.locator(".code .copy").click();
      await page.waitForSelector(".code .copy span:text-is('Copied')");
      assert.equal(await copied(), "SELECT *\n  FROM items; -- **not bold**");
      await page.click(".message.assistant .acts .copy");
      await page.waitForSelector(".acts .copy span:text-is('Copied')");
      assert.equal(await copied(), MARKDOWN);
      await check(page, seen, `Markdown-${device}`);
      await page.screenshot({ path: join(pictures, `chat-markdown-${device}.png`), fullPage: true });
      await context.close();
    }
  },

  async "messages are edited and replies regenerated, as branches that stay"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    const bodies = await reply(page, (count) => `reply ${count}`);
    const shown = () => page.locator(".message .body").allTextContents();
    const asked = () => bodies.at(-1).messages.map(({ content }) => content);
    const until = (texts) => page.waitForFunction((texts) => JSON.stringify([...document.querySelectorAll(".message .body")].map((body) => body.textContent)) === texts, JSON.stringify(texts));
    await visit(page, "chat");
    await say(page, "one", 1);
    await say(page, "two", 2);
    await page.locator(".message.assistant").nth(0).getByRole("button", { name: "Regenerate" }).click();
    await until(["one", "reply 3"]);
    assert.deepEqual(asked(), ["one"]);
    // By keyboard, to the first reply and what follows it.
    await page.locator(".message.assistant .previous").focus();
    await page.keyboard.press("Enter");
    await until(["one", "reply 1", "two", "reply 2"]);
    assert.equal(await page.evaluate(() => document.activeElement.ariaLabel), "Next version");
    assert.equal(await page.locator(".message.assistant").first().locator("[role=img]").textContent(), "1/2");
    await page.locator(".message.user").nth(1).getByRole("button", { name: "Edit" }).click();
    await page.keyboard.press("Escape");
    assert.deepEqual(await shown(), ["one", "reply 1", "two", "reply 2"]);
    await page.locator(".message.user").nth(1).getByRole("button", { name: "Edit" }).click();
    await check(page, seen, "a message that is edited");
    await page.keyboard.type("!");
    await page.keyboard.press("Enter");
    await until(["one", "reply 1", "two!", "reply 4"]);
    assert.deepEqual(asked(), ["one", "reply 1", "two!"]);
    await check(page, seen, "branches");
    await page.screenshot({ path: join(pictures, "chat-branches.png") });
    await page.reload();
    await until(["one", "reply 1", "two!", "reply 4"]);

    const file = async (name) => {
      const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name }).click()]);
      return [download.suggestedFilename(), readFileSync(await download.path(), "utf8")];
    };
    assert.deepEqual(await file("Export Markdown"), ["one.md", "# one\n\n## You\n\none\n\n## tiny-hybrid-4bit\n\nreply 1\n\n## You\n\ntwo!\n\n## tiny-hybrid-4bit\n\nreply 4\n"]);
    const [name, json] = await file("Export JSON");
    assert.equal(name, "one.json");
    assert.equal(JSON.parse(json).messages.length, 7);
    // It comes back beside the first, with all of its branches.
    const load = (text) => page.setInputFiles("[aria-label='Conversation to import']", { name, mimeType: "application/json", buffer: Buffer.from(text) });
    await load(json);
    await page.waitForFunction(() => document.querySelectorAll(".kept .name").length === 2);
    await until(["one", "reply 1", "two!", "reply 4"]);
    await page.locator(".message.user .previous").nth(0).click();
    await until(["one", "reply 1", "two", "reply 2"]);
    // What is wrong is named, and nothing is kept of it.
    for (const [text, problem] of [
      ["{", "it is no JSON"], ["[]", "format: must be"], [json.replace('"role": "user"', '"role": "tool"'), "messages[0].role: must be"],
      [json.replace('"parent": null', '"parent": "later"'), "messages[0].parent: must be"], [json.replace('"content": "one"', '"content": 1'), "messages[0].content: must be"],
    ]) {
      await load(text);
      await page.waitForSelector(`.toast.bad:has-text(${JSON.stringify(problem)})`);
    }
    assert.equal(await page.locator(".kept .name").count(), 2);
    await check(page, seen, "an imported conversation");
    await context.close();
  },

  async "settings for clients are shown, work, and hold no key"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "connect");
    await page.waitForSelector(".snippet code");
    await page.selectOption("#connect-model", "gpt-small");
    const texts = {};
    for (const button of await page.locator("[aria-label=Client] button").all()) {
      await button.click();
      texts[await button.textContent()] = await page.textContent(".snippet pre");
      assert.equal(await button.getAttribute("aria-pressed"), "true");
      await check(page, seen, `settings of ${await button.textContent()}`);
    }
    assert.deepEqual(Object.keys(texts), ["curl", "OpenAI for Python", "Anthropic for Python", "Ollama for Python", "LangChain", "Codex", "Claude Code", "opencode", "aider"]);
    const whole = await page.evaluate(() => document.documentElement.outerHTML);
    assert.ok(!whole.includes(OPERATOR));
    for (const [name, text] of Object.entries(texts)) {
      for (const part of [url, "gpt-small", "STEERSMAN_API_KEY"]) assert.ok(text.includes(part), `${name}: ${part} is missing`);
      assert.ok(!text.includes(OPERATOR), name);
    }
    const env = { ...process.env, STEERSMAN_API_KEY: CLIENT };
    const answer = JSON.parse(await run("sh", ["-c", texts.curl.replace("curl ", "curl --silent ")], env));
    assert.ok(answer.choices[0].message.content.includes("Rome"), JSON.stringify(answer));
    const { provider, model } = JSON.parse(texts.opencode);
    assert.deepEqual([provider.steersman.options.baseURL, model], [`${url}/v1`, "steersman/gpt-small"]);
    const { limit } = provider.steersman.models["gpt-small"];
    assert.ok(limit.context > limit.output && texts.Codex.includes(`model_context_window = ${limit.context}`), JSON.stringify(limit));
    for (const [name, package_] of [["OpenAI for Python", "openai"], ["Anthropic for Python", "anthropic"], ["Ollama for Python", "ollama"], ["LangChain", "langchain_openai"]]) {
      writeFileSync(join(work, `${package_}.py`), CLASSES);
      const calls = (await run("python3", ["-c", texts[name]], { ...env, PYTHONPATH: work })).trim().split("\n").at(-1);
      assert.deepEqual(JSON.parse(calls), EXPECTED_CALLS[package_](url), name);
    }
    await run("python3", ["-c", "import sys, tomllib; assert tomllib.loads(sys.argv[1])['model_providers']['steersman']['wire_api'] == 'responses'", texts.Codex], env);
    // In place of the programs: one that prints what it was given.
    const programs = join(work, "programs");
    mkdirSync(programs);
    const given = async (name, program) => {
      writeFileSync(join(programs, program), `#!${process.execPath}\nconsole.log(JSON.stringify({ args: process.argv.slice(2), env: process.env }));\n`);
      chmodSync(join(programs, program), 0o755);
      return JSON.parse(await run("sh", ["-c", texts[name]], { ...env, PATH: `${programs}:${process.env.PATH}` }));
    };
    const claude = await given("Claude Code", "claude");
    const set = Object.entries(claude.env).filter(([variable, value]) => /^(ANTHROPIC|CLAUDE_CODE)_/.test(variable) && env[variable] !== value);
    assert.deepEqual(Object.fromEntries(set), {
      ANTHROPIC_BASE_URL: url, ANTHROPIC_AUTH_TOKEN: CLIENT, ANTHROPIC_MODEL: "gpt-small", ANTHROPIC_DEFAULT_OPUS_MODEL: "gpt-small",
      ANTHROPIC_DEFAULT_SONNET_MODEL: "gpt-small", ANTHROPIC_DEFAULT_HAIKU_MODEL: "gpt-small", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    });
    assert.deepEqual(claude.args, []);
    const { args } = await given("aider", "aider");
    assert.deepEqual(args, ["--model", "openai/gpt-small", "--openai-api-base", `${url}/v1`, "--openai-api-key", CLIENT]);
    await context.close();
  },

  async "the reference of the API is linked, and looks like the console"({ browser, url }) {
    for (const theme of ["light", "dark"]) {
      for (const [device, size] of Object.entries(SIZES)) {
        const { page, seen, context } = await open(browser, url, { size, theme, key: OPERATOR });
        await visit(page, "connect");
        const color = () => page.evaluate(() => {
          const { backgroundColor, color: ink } = getComputedStyle(document.body);
          return `${ink} on ${backgroundColor}`;
        });
        const own = await color();
        await page.click("a[href='/docs']");
        await page.waitForSelector("#operations details");
        assert.equal(await color(), own);
        await page.locator("#operations summary").first().click();
        await check(page, seen, `docs-${theme}-${device}`);
        await page.screenshot({ path: join(pictures, `docs-${theme}-${device}.png`) });
        await page.click("a[href='/']");
        await page.waitForSelector(".view h1");
        await context.close();
      }
    }
  },

  async "hostile and unfinished Markdown is bounded and inert"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    const hostile = [
      ">".repeat(10_000), "> ".repeat(10_000), "- ".repeat(10_000), "*".repeat(1_000_000), "*".repeat(19_999), "**a ".repeat(5000), "_a *b ".repeat(3000),
      "`".repeat(19_999), Array.from({ length: 190 }, (_, i) => "`".repeat(i + 1)).join(" "), "[".repeat(19_999), "[a](".repeat(4000), `${"|".repeat(50_000)}\n${"-|".repeat(50_000)}`,
      `|a|b|\n|-|-|\n${"|".repeat(150_000)}`, `\`\`\`${" ".repeat(150_000)}\``, `#${" ".repeat(150_000)}`, `-${" ".repeat(150_000)}x`, "* ".repeat(9000), "\\".repeat(19_999),
      Array.from({ length: 300 }, (_, i) => `${" ".repeat(2 * i)}- a`).join("\n"), `${"- a\n".repeat(40_000)}`, `https://${"(".repeat(9000)}`, `https://a.b/${".".repeat(9000)}`,
      "<script>alert(1)</script><img src=x onerror=alert(1)>", "[a](javascript:alert(1)) [b](data:text/html,x) [c](<javascript:x>) ![i](https://example.org/i.png)", "[a](https://example.org\" onclick=\"alert(1))",
    ];
    const found = await page.evaluate(async (texts) => {
      const { blocks } = await import("/console/markdown.js");
      const deep = (element) => 1 + Math.max(0, ...[...element.children].slice(0, 1000).map(deep));
      return texts.map((text) => {
        const root = document.createElement("div");
        root.append(...blocks(text).map(({ make }) => make()));
        const all = [...root.querySelectorAll("*")];
        return {
          depth: deep(root), count: all.length, tags: [...new Set(all.map(({ localName }) => localName))],
          attributes: [...new Set(all.flatMap((element) => element.getAttributeNames()))],
          links: [...root.querySelectorAll("a")].map(({ protocol }) => protocol), letters: root.textContent.length,
        };
      });
    }, hostile);
    for (const [i, { depth, count, tags, attributes, links }] of found.entries()) {
      const name = hostile[i].slice(0, 20);
      assert.ok(depth < 60, `${name}: ${depth} deep`);
      assert.ok(count <= hostile[i].length, `${name}: ${count} elements`);
      for (const tag of ["script", "img", "iframe", "b", "style", "object"]) assert.ok(!tags.includes(tag), `${name}: ${tag}`);
      assert.ok(!attributes.some((attribute) => attribute.startsWith("on") || attribute === "style"), `${name}: ${attributes}`);
      assert.ok(links.every((protocol) => ["http:", "https:"].includes(protocol)), `${name}: ${links}`);
    }
    // A million asterisks stay text.
    assert.equal(found[3].letters, 1_000_000);
    // What has streamed so far is shown at every length, and what came before does not change.
    const streamed = await page.evaluate(async (text) => {
      const { blocks } = await import("/console/markdown.js");
      return Array.from({ length: text.length }, (_, i) => {
        const root = document.createElement("div");
        const parts = blocks(text.slice(0, i + 1));
        root.append(...parts.map(({ make }) => make()));
        return { first: parts[0].key, letters: root.textContent.length, codes: root.querySelectorAll("pre").length, heading: root.querySelector("h3")?.textContent };
      });
    }, MARKDOWN);
    const opened = MARKDOWN.indexOf("```sql\nS") + 8;
    for (const { first, heading } of streamed.slice(MARKDOWN.indexOf("\n"))) assert.deepEqual([first, heading], ["# Final SQL", "Final SQL"]);
    for (const { codes } of streamed.slice(opened)) assert.equal(codes, 1);
    await check(page, seen, "hostile Markdown");
    await context.close();
  },

  async "a request is watched while it runs"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    // Long enough to be found while it runs: the reply cannot end before.
    const response = await ask(url, LOOP, { stream: true, ignore_eos: true, max_tokens: 4000 });
    const [first, all] = response.body.tee();
    const text = new Response(all).text();
    const { value } = await first.getReader().read();
    const id = JSON.parse(new TextDecoder().decode(value).split("\n")[0].slice(6)).id;
    await page.evaluate((to) => { location.hash = `#/requests/${to}`; }, id);
    await page.waitForSelector(".block.reasoning");
    await page.screenshot({ path: join(pictures, "life-running.png") });
    const chunks = (await text).split("\n\n").filter((line) => line.startsWith("data: {")).map((line) => JSON.parse(line.slice(6)));
    const streamed = (field) => chunks.map((chunk) => chunk.choices[0]?.delta?.[field] ?? "").join("");
    await page.waitForSelector(".records li");
    await page.waitForSelector(".block.answer");
    // The text is that of the client, with the decision in it, at its token.
    const shown = await page.evaluate(() => [...document.querySelectorAll(".block")].map((block) => [...block.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data).join("")));
    assert.equal(shown.join(""), streamed("reasoning_content") + streamed("content"));
    const marks = await page.locator(".transcript .mark").allTextContents();
    assert.ok(marks.some((mark) => /^token [\d,]+.*loop/s.test(mark)), marks.join("; "));
    await check(page, seen, "a request");
    await page.screenshot({ path: join(pictures, "life-ended.png"), fullPage: true });
    // Its text is gone, its decisions are not.
    await page.reload();
    await page.waitForSelector(".mark");
    assert.equal(await page.locator(".block").count(), 0);
    await context.close();
  },

  async "what the views say of one request, of limits and of memory agrees"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "chat");
    await page.selectOption("#chat-profile", "agents");
    await say(page, "What is the capital of Italy?", 1);
    const [, tokens, rate] = (await page.textContent(".message.assistant .foot")).match(/^([\d,]+) tokens.* ([\d.]+) tokens\/s/);
    await visit(page, "requests");
    const row = page.locator(".requests-table tbody tr").first();
    assert.deepEqual([await row.locator(".reply").textContent(), Number(await row.locator(".rate").textContent())], [tokens, Number(rate)]);
    const spark = await page.locator(".spark").boundingBox();
    const tile = await page.locator(".tile", { has: page.locator(".spark") }).boundingBox();
    assert.ok(spark.x + spark.width < tile.x + tile.width - 8);
    // A row opens as its link does, and a profile with texts in its traces says where they are.
    await row.locator(".time").click();
    await page.waitForSelector(".view.requests .facts");
    await page.waitForFunction(() => document.querySelector(".replies").textContent.includes("Its profile has trace_text"));
    await visit(page, "profiles");
    assert.match(await page.textContent("section[aria-labelledby=profile-default] .facts"), /Reply tokensno limit/);
    await visit(page, "policies");
    assert.ok((await page.textContent("section[aria-labelledby=policy-passthrough]")).includes("There is no earlier version to roll back to"));
    await visit(page, "models");
    await page.waitForSelector(".figure");
    const memory = await page.textContent("section[aria-labelledby=memory-title]");
    assert.ok(size(memory) >= size(memory.split("Weights")[1]), memory);
    // A time of another day has its date.
    const [now, earlier, day, none] = await page.evaluate(async () => {
      const { time } = await import("/console/dom.js");
      const before = new Date(Date.now() - 3 * 86_400_000);
      const day = [before.getFullYear(), before.getMonth() + 1, before.getDate()].map((part) => String(part).padStart(2, "0")).join("-");
      return [time(Date.now() / 1000), time(before / 1000), day, time(null)];
    });
    assert.match(now, /^\d\d:\d\d:\d\d$/);
    assert.match(earlier, /^\S+ \d\d:\d\d:\d\d$/);
    assert.deepEqual([earlier.split(" ")[0], none], [day, "–"]);
    await check(page, seen, "models");
    await context.close();
  },

  async "charts show the last hours, also after a reload"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    const samples = async () => {
      const headers = { authorization: `Bearer ${OPERATOR}` };
      return (await (await fetch(`${url}/v1/history`, { headers })).json()).samples;
    };
    // The server takes one each ten seconds: three of them, and the requests that were sent before.
    while ((await samples()).length < 3) await new Promise((done) => setTimeout(done, 500));
    const counted = (await samples()).reduce((sum, { requests }) => sum + requests, 0);
    const { requests } = await (await fetch(`${url}/v1/requests`, { headers: { authorization: `Bearer ${OPERATOR}` } })).json();
    assert.ok(counted > 2 && counted <= requests.length, `${counted} of ${requests.length}`);
    const drawn = () => page.locator(".chart .line").evaluateAll((lines) => lines.map((line) => line.getAttribute("d").split(/[ML]/).length - 1));
    for (let i = 0; i < 2; i += 1) {
      await page.waitForFunction(() => document.querySelector(".chart .line")?.getAttribute("d").includes("L"));
      const [rate, perMinute, first, waiting, memory] = await drawn();
      assert.ok(rate >= 3 && rate === perMinute && rate === waiting && rate === memory, `${await drawn()}`);
      assert.ok(first > 0 && first <= rate, `${await drawn()}`);
      const texts = await page.locator(".chart").allTextContents();
      assert.match(texts[0], /^Tokens per secondmedian [\d.]+/);
      assert.match(texts[2], /^First tokenmedian [\d.]+ (ms|s)/);
      assert.match(texts[3], /^Waiting requestsmedian 0/);
      assert.match(texts[4], /^Memorymedian [\d.]+ [KMG]iB/);
      await check(page, seen, "charts");
      await page.screenshot({ path: join(pictures, "charts.png") });
      await page.reload();
    }
    await context.close();
  },

  async "requests are searched by id, profile and notes"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    const { id } = await ask(url, "What is the capital of Peru?", { model: "tiny-hybrid-4bit@agents" });
    const rows = (text) => page.locator(".requests-table tbody tr", { hasText: text });
    await rows(id.slice(0, 18)).waitFor();
    const all = await page.locator(".requests-table tbody tr").count();
    for (const [text, wanted] of [[id, "agents"], ["AGENTS", "agents"], ["loop", "default"]]) {
      await page.fill("#search", text);
      await page.waitForFunction(([wanted, all]) => {
        const found = [...document.querySelectorAll(".requests-table tbody .profile")];
        return found.length > 0 && found.length < all && found.every((cell) => cell.textContent.startsWith(wanted));
      }, [wanted, all]);
    }
    await page.fill("#search", "no request has this");
    await page.waitForSelector(".empty:has-text('Nothing found'):visible");
    await check(page, seen, "a search without a result");
    await page.fill("#search", "");
    await rows(id.slice(0, 18)).waitFor();
    await context.close();
  },

  async "conversations are searched by titles and messages"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await reply(page, (count) => `The reply is ${["Rome", "Lima"][count - 1]}.`);
    await visit(page, "chat");
    assert.ok(await page.locator(".history [type=search]").isHidden());
    await say(page, "Question one", 1);
    await page.click("text=New chat");
    await say(page, "Question two", 1);
    const shown = (names) => page.waitForFunction((names) => JSON.stringify([...document.querySelectorAll(".kept .name")].map((name) => name.textContent)) === names, JSON.stringify(names));
    for (const [text, names] of [
      ["question", ["Question two", "Question one"]], ["ONE", ["Question one"]], ["lima", ["Question two"]], ["the reply is r", ["Question one"]], ["nowhere", []],
    ]) {
      await page.fill("[aria-label='Search conversations']", text);
      await shown(names);
    }
    await page.waitForSelector(".history :text('No conversation has this text.')");
    await check(page, seen, "a search in conversations");
    await page.fill("[aria-label='Search conversations']", "rome");
    await page.click(".kept .name:text-is('Question one')");
    assert.equal(await page.textContent(".message.assistant .body"), "The reply is Rome.");
    await context.close();
  },

  async "keys are created, shown once and revoked by clicking"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
    await visit(page, "keys");
    await page.waitForSelector(".empty:has-text('No key was created')");
    await page.fill("#key-name", "phone-1");
    await page.selectOption("#key-opens", "profile agents");
    await page.selectOption("#key-expires", "30d");
    await page.click("button:text-is('Create')");
    const secret = await page.textContent("#new-key");
    assert.match(secret, /^sk-[\w-]{43}$/);
    assert.equal(await page.evaluate(() => document.activeElement.id), "created-title");
    await page.click(".created .copy");
    await page.waitForSelector(".created .copy span:text-is('Copied')");
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), secret);
    const line = page.locator(".keys-table tbody tr", { hasText: "phone-1" });
    await line.waitFor();
    const cells = await line.locator("td").allTextContents();
    assert.deepEqual([cells[1], cells[2], cells[5]], [`${secret.slice(0, 11)}…`, "profile agents", "active"]);
    assert.match(cells[4], /^\d{4}-\d\d-\d\d /);
    await check(page, seen, "a new key");
    await page.screenshot({ path: join(pictures, "keys-created.png"), fullPage: true });
    const asks = async () => (await fetch(`${url}/v1/models`, { headers: { authorization: `Bearer ${secret}` } })).status;
    assert.equal(await asks(), 200);
    // It is shown this one time.
    await page.click("button:text-is('Done')");
    await visit(page, "log");
    await page.waitForSelector(".log-line:has-text('key created by an operator')");
    assert.ok(!(await page.evaluate(() => document.documentElement.outerHTML)).includes(secret.slice(11)));
    await visit(page, "keys");
    await line.waitFor();
    assert.ok(!(await page.evaluate(() => document.documentElement.outerHTML)).includes(secret.slice(11)));
    // What is wrong is said.
    await page.fill("#key-name", "phone-1");
    await page.click("button:text-is('Create')");
    await page.waitForSelector(".problem:has-text('there is a key `phone-1` already')");
    await page.getByRole("button", { name: "Revoke phone-1" }).click();
    await page.click("#confirm-yes");
    await page.waitForSelector(".toast:text-is('phone-1 is revoked')");
    assert.equal(await asks(), 401);
    await line.locator(".chip:text-is('revoked')").waitFor();
    await check(page, seen, "a revoked key");
    await context.close();
  },

  async "the key of the console is revoked with a word, and the last one with two"({ browser, url }) {
    const { page, context } = await open(browser, url, { key: OPERATOR });
    const headers = { authorization: `Bearer ${OPERATOR}`, "content-type": "application/json" };
    const made = await (await fetch(`${url}/v1/keys`, { method: "POST", headers, body: JSON.stringify({ name: "second", operator: true }) })).json();
    await page.click("#key");
    await enter(page, made.key);
    await visit(page, "keys");
    await page.waitForSelector("tr:has-text('second') :text('this console')");
    // As on a server without server.admin_keys.
    const bodies = [];
    await page.route("**/v1/keys/second/revoke", (route) => {
      const body = route.request().postDataJSON();
      bodies.push(body);
      if (body.last) return route.continue();
      return route.fulfill({ status: 409, contentType: "application/json", body: JSON.stringify({ error: { code: "last_operator_key", message: "`second` is the last key; send `\"last\": true` to revoke it" } }) });
    });
    const question = page.locator("#confirm-text");
    const ask = async () => {
      await page.getByRole("button", { name: "Revoke second" }).click();
      assert.ok((await question.textContent()).includes("This console uses it"));
      await page.click("#confirm-yes");
      await page.waitForFunction(() => document.querySelector("#confirm-text").textContent === "`second` is the last key.");
    };
    await ask();
    await page.click("#confirm-dialog button[value=no]");
    await page.waitForSelector(".toast.bad:text-is('It was not revoked.')");
    await ask();
    await page.click("#confirm-yes");
    await page.waitForSelector("#key-dialog[open]");
    assert.deepEqual(bodies, [{}, {}, { last: true }]);
    await enter(page, OPERATOR);
    await context.close();
  },

  async "a key that has expired is told from an unknown one"({ browser, url }) {
    const { page, seen, context } = await open(browser, url);
    // tests/http/keys.rs has such a key; here it would take a minute.
    const message = "the key `guest` has expired at 2026-01-01T00:00:00Z: ask an operator of this server for another";
    await page.route("**/v1/profiles", (route) => (route.request().headers().authorization === "Bearer expired"
      ? route.fulfill({ status: 401, contentType: "application/json", body: JSON.stringify({ error: { code: "key_expired", message } }) })
      : route.continue()));
    for (const [key, words] of [["expired", message], ["wrong", "The server does not know this key."]]) {
      await page.fill("#key-input", key);
      await page.keyboard.press("Enter");
      await page.waitForFunction((words) => document.querySelector("#key-problem").textContent === words, words);
    }
    await check(page, seen, "a key that has expired");
    await context.close();
  },

  async "a client sees neither keys nor log"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: CLIENT });
    for (const view of ["keys", "log"]) {
      await visit(page, view);
      assert.ok((await page.textContent(".view .notice")).includes("operator's key"));
      assert.equal(await page.locator(".view input, .view table, .log-line").count(), 0);
    }
    assert.ok(!seen.answers.some((answer) => /v1\/(keys|log)/.test(answer)));
    await context.close();
  },

  async "the log follows, and is filtered by level and text"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "log");
    const { id } = await ask(url, "What is the capital of Italy?");
    const line = page.locator(".log-line", { hasText: `id=${id}` });
    await line.waitFor();
    const texts = await page.locator(".log-line").allTextContents();
    assert.ok(texts.some((text) => text.includes("ready")) && texts.every((text) => !text.includes("capital of")), texts.join("\n"));
    // The newest line is in sight.
    const isDown = () => page.locator(".log-lines").evaluate((list) => list.scrollHeight - list.scrollTop - list.clientHeight < 4);
    assert.ok(await isDown());
    await check(page, seen, "the log");
    await page.fill("#log-filter", id.toUpperCase());
    const found = await line.count();
    assert.ok(found > 0 && found === await page.locator(".log-line").count(), `${found} lines`);
    await page.fill("#log-filter", "");
    await page.selectOption("#log-level", "WARN");
    assert.equal(await line.count(), 0);
    await fetch(`${url}/v1/models`, { headers: { authorization: "Bearer wrong" } });
    await page.locator(".log-line.warn", { hasText: "wrong key" }).first().waitFor();
    // The choice stays, and so do the lines.
    await page.reload();
    await page.locator(".log-line.warn", { hasText: "wrong key" }).first().waitFor();
    assert.equal(await page.inputValue("#log-level"), "WARN");
    await page.selectOption("#log-level", "INFO");
    await line.first().waitFor();
    await page.fill("#log-filter", "no line has this");
    await page.waitForSelector(".empty:has-text('No line'):visible");
    await check(page, seen, "an empty log");
    await context.close();
  },

  async "requests that run are listed with their phase"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    // On a busy machine the page takes longer to open than a short reply to end.
    const long = { stream: true, ignore_eos: true, max_tokens: 30_000 };
    const replies = await Promise.all(["Rome", "Paris", "Lima"].map((town) => ask(url, `${LOOP} ${town}`, long)));
    await page.waitForSelector("tr:has(.chip.reasoning, .chip.answer) .rate");
    await page.waitForFunction(() => Number(document.querySelector("#running").textContent) > 0);
    await check(page, seen, "running requests");
    await page.screenshot({ path: join(pictures, "requests-running.png") });
    // Clients that hang up.
    await Promise.all(replies.map((reply) => reply.body.cancel()));
    await page.waitForSelector(".chip.cancelled");
    await context.close();
  },

  async "a policy is swapped and rolled back by clicking"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "policies");
    const version = "section[aria-labelledby=policy-house] tbody tr:first-child code";
    const before = await page.getAttribute(version, "title");
    const [chooser] = await Promise.all([page.waitForEvent("filechooser"), page.click("section[aria-labelledby=policy-house] [data-act=push]")]);
    await chooser.setFiles(join(ROOT, "policies/passthrough/passthrough.wasm"));
    await page.waitForFunction(([path, old]) => document.querySelector(path)?.title !== old, [version, before]);
    const after = await page.getAttribute(version, "title");
    const passed = await ask(url, "What is the capital of Italy?", { max_tokens: 5 });
    assert.ok(passed.id);
    await page.screenshot({ path: join(pictures, "policies-pushed.png"), fullPage: true });
    await page.click("section[aria-labelledby=policy-house] [data-act=rollback]");
    await page.waitForSelector("#confirm-dialog[open]");
    await page.screenshot({ path: join(pictures, "policies-confirm.png") });
    await page.click("#confirm-yes");
    await page.waitForFunction(([path, old]) => document.querySelector(path)?.title === old, [version, before]);
    assert.notEqual(before, after);
    // The copy is checked, not what the page says.
    const { policies } = await (await fetch(`${url}/v1/policies`, { headers: { authorization: `Bearer ${OPERATOR}` } })).json();
    assert.equal(policies.find(({ name }) => name === "house").sha256, before);
    // A component that is none is refused, in words.
    const [again] = await Promise.all([page.waitForEvent("filechooser"), page.click("section[aria-labelledby=policy-house] [data-act=push]")]);
    await again.setFiles({ name: "no.wasm", mimeType: "application/wasm", buffer: Buffer.from("none") });
    await page.waitForSelector(".toast.bad");
    assert.equal(await page.getAttribute(version, "title"), before);
    await page.click("section[aria-labelledby=policy-passthrough] .shadow-report summary");
    await page.waitForSelector(".shadow-report .records li");
    await check(page, seen, "policies");
    await page.screenshot({ path: join(pictures, "policies-shadow.png"), fullPage: true });
    await context.close();
  },

  async "policies say why none can be pushed, and that no version is active"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    let retries = false;
    // As on a server without policy.folder, and with a component that does not compile: tests/monitoring.py has one.
    await page.route("**/v1/policies", async (route) => {
      const response = await route.fetch();
      const report = await response.json();
      const of = (wanted) => report.policies.find(({ name }) => name === wanted);
      of("passthrough").file = null;
      Object.assign(of("house"), { sha256: "", retries, problem: { at: Date.now() / 1000, message: "it takes more than 8 s" } });
      return route.fulfill({ response, json: report });
    });
    await visit(page, "policies");
    const shipped = page.locator("section[aria-labelledby=policy-passthrough]");
    await shipped.getByText("It is in the binary: set policy.folder to push versions of it.").waitFor();
    assert.ok(await shipped.locator("[data-act=push]").isDisabled());
    const house = page.locator("section[aria-labelledby=policy-house]");
    const notice = () => house.locator(".notice.bad").first().textContent();
    assert.equal(await notice(), "No version is active: it fails in every requestPush another version, or replace its file.");
    assert.match(await house.locator(".notice.bad").nth(1).textContent(), /^It did not compile at \d\d:\d\d:\d\d\s*it takes more than 8 s$/);
    assert.ok(await house.locator("[data-act=push]").isEnabled());
    await check(page, seen, "a policy that is not active");
    retries = true;
    await house.getByText("The server compiles it again by itself.").waitFor();
    await context.close();
  },

  async "a model is loaded, kept and unloaded by clicking"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "models");
    const card = page.locator(".model", { hasText: "spare" });
    const state = async () => {
      const { models } = await (await fetch(`${url}/health`)).json();
      return models.find(({ model }) => model === "spare");
    };
    await card.getByRole("button", { name: "Load spare", exact: true }).focus();
    await page.keyboard.press("Enter");
    await page.waitForSelector(".toast:text-is('spare is loaded')");
    assert.equal((await state()).state, "loaded");
    await card.locator(".chip:text-is('loaded')").waitFor();
    await card.getByText("Unloaded in").waitFor();
    await check(page, seen, "a loaded model");
    await page.screenshot({ path: join(pictures, "models-loaded.png"), fullPage: true });
    await card.getByRole("button", { name: "Keep loaded spare" }).click();
    await page.waitForSelector(".toast:text-is('spare stays loaded')");
    assert.equal((await state()).expires_s, null);
    await card.getByRole("button", { name: "Keep loaded spare" }).waitFor({ state: "detached" });
    await card.getByRole("button", { name: "Unload spare" }).click();
    await page.waitForSelector(".toast:text-is('spare is unloaded')");
    await card.getByRole("button", { name: "Load spare", exact: true }).waitFor();
    assert.equal((await state()).state, "on disk");
    // One that stays loaded says so; one without files offers nothing.
    await page.getByRole("button", { name: "Unload tiny-hybrid-4bit" }).click();
    await page.waitForSelector(".toast:has-text('tiny-hybrid-4bit stays loaded: the configuration keeps it')");
    assert.equal(await page.locator(".model", { hasText: "other" }).locator("button").count(), 0);
    await context.close();
  },

  async "a refused download says why"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "models");
    await page.fill("#repo", "owner/none");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector(".progress [role=status]").textContent.startsWith("Not downloaded"));
    await check(page, seen, "models");
    await context.close();
  },

  async "a download shows how far it is, is stopped, and is seen by who did not ask for it"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    let running = null;
    let stopped = 0;
    let body = "";
    // A hub is not needed to show what the server reports; tests/http/pull.rs has the reports.
    await page.route("**/v1/models/pull", (route) => {
      const method = route.request().method();
      const json = (value) => route.fulfill({ contentType: "application/json", body: JSON.stringify(value) });
      if (method === "POST") return route.fulfill({ contentType: "text/event-stream", body });
      if (method === "DELETE") {
        stopped += 1;
        running = null;
        return json({ model: "owner/big", stopped: true });
      }
      return json({ running });
    });
    const events = (...reports) => reports.map((report) => `data: ${JSON.stringify(report)}\n\n`).join("");
    const status = (text) => page.waitForFunction((text) => document.querySelector(".progress [role=status]").textContent.includes(text), text);
    const planned = { status: "downloading", total: 2048, completed: 0, left: 2048, disk_free: 1, memory: { weights: 4096, limit: 1024, fits: false } };
    const half = { status: "downloading", file: "model.safetensors", total: 2048, completed: 1024, left: 1024 };
    await visit(page, "models");
    await page.fill("#repo", "owner/big");
    body = events(planned, half, { status: "success", folder: "/cache/big" });
    await page.keyboard.press("Enter");
    await status("owner/big is in /cache/big");
    await page.waitForSelector(".toast.bad:has-text('needs 4.0 KiB of memory')");
    assert.ok(await page.locator(".progress button").isHidden());
    await check(page, seen, "a download");
    // The connection is lost: the server goes on, and the page follows.
    body = events(planned, half);
    await page.click("button:text-is('Download')");
    await status("The connection was lost");
    running = { model: "owner/big", file: "model.safetensors", completed: 1536, total: 2048 };
    await status("owner/big: 1.5 KiB of 2.0 KiB, model.safetensors");
    assert.equal(await page.locator("progress").evaluate((bar) => bar.value), 0.75);
    assert.ok(await page.locator("button:text-is('Download')").isDisabled());
    // So does one that is opened later.
    await page.reload();
    await status("owner/big: 1.5 KiB of 2.0 KiB");
    await check(page, seen, "a download of another page");
    await page.screenshot({ path: join(pictures, "models-download.png"), fullPage: true });
    await page.click(".progress button:text-is('Stop')");
    await status("has ended");
    assert.equal(stopped, 1);
    assert.ok(await page.locator("button:text-is('Download')").isEnabled());
    await context.close();
  },

  async "models on the disk are listed and removed by clicking"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    // No hub is reached: the cache is that of the machine, whose files no test removes.
    let models = [
      { model: "owner/served", bytes: 4096, complete: true, served: true },
      { model: "owner/spare", bytes: 2048, complete: true, served: false },
      { model: "owner/half", bytes: 1024, complete: false, served: false },
    ];
    await page.route("**/v1/downloads", (route) => route.fulfill({ contentType: "application/json", body: JSON.stringify({ models }) }));
    await page.route("**/api/delete", (route) => {
      const { model } = route.request().postDataJSON();
      models = models.filter((one) => one.model !== model);
      return route.fulfill({ status: 200, body: "" });
    });
    await visit(page, "models");
    const rows = page.locator("section[aria-labelledby=disk-title] tbody tr");
    await rows.first().waitFor();
    assert.deepEqual(await rows.locator(".chip").allTextContents(), ["served", "complete", "incomplete"]);
    assert.equal(await rows.first().locator("button").count(), 0);
    await check(page, seen, "models on the disk");
    await page.getByRole("button", { name: "Remove owner/spare" }).click();
    await page.click("#confirm-dialog button[value=no]");
    assert.equal(await rows.count(), 3);
    await page.getByRole("button", { name: "Remove owner/spare" }).click();
    assert.ok((await page.textContent("#confirm-text")).includes("2.0 KiB"));
    await page.click("#confirm-yes");
    await page.waitForSelector(".toast:text-is('owner/spare is removed')");
    await page.getByRole("button", { name: "Remove owner/spare" }).waitFor({ state: "detached" });
    await context.close();
  },

  async "the keyboard reaches everything"({ browser, url }) {
    const { page, context } = await open(browser, url, { key: OPERATOR });
    for (const [index, view] of VIEWS.entries()) {
      await page.evaluate(() => document.activeElement.blur());
      await page.keyboard.press(String(index + 1));
      await page.waitForSelector(`.view.${view} h1`);
      assert.equal(await page.evaluate(() => document.activeElement.tagName), "H1", view);
    }
    await page.evaluate(() => document.activeElement.blur());
    await visit(page, "requests");
    await page.waitForSelector(".requests-table a");
    const reached = new Set();
    for (let i = 0; i < 40; i += 1) {
      await page.keyboard.press("Tab");
      reached.add(await page.evaluate(() => document.activeElement.id || document.activeElement.dataset.view || document.activeElement.className || document.activeElement.tagName));
    }
    await page.locator(".requests-table a").first().focus();
    await page.keyboard.press("Enter");
    await page.waitForSelector(".facts");
    await page.evaluate(() => document.activeElement.blur());
    for (const wanted of ["key", "theme"]) assert.ok(reached.has(wanted), `${wanted} is not among ${[...reached]}`);
    await page.focus("#theme");
    await page.keyboard.press("Enter");
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
    await context.close();
  },

  async "every view, light and dark, on a desk and on a phone"({ browser, url }) {
    for (const theme of ["light", "dark"]) {
      for (const [device, size] of Object.entries(SIZES)) {
        const { page, seen, context } = await open(browser, url, { size, theme, key: OPERATOR });
        for (const view of VIEWS) {
          await visit(page, view);
          await page.waitForFunction(() => document.querySelector(".view").textContent.length > 150);
          if (view !== "chat") await page.waitForSelector(".view dd, .view tbody td, .view .log-line");
          const name = `${view}-${theme}-${device}`;
          await check(page, seen, name);
          await page.screenshot({ path: join(pictures, `${name}.png`), fullPage: device === "phone" });
        }
        await page.evaluate(() => { location.hash = "#/requests"; });
        await page.locator(".requests-table tr", { hasText: "/chat/completions" }).locator("a").nth(1).click();
        await page.waitForSelector(".mark, .records");
        await check(page, seen, `life-${theme}-${device}`);
        await page.screenshot({ path: join(pictures, `life-${theme}-${device}.png`), fullPage: true });
        await context.close();
      }
    }
  },
};

const { server, url } = await serve();
let browser;
try {
  assert.ok(BROWSER, "no Chromium: set CHROMIUM to its path");
  // As root, Chromium has no sandbox.
  browser = await chromium.launch({ executablePath: BROWSER, args: process.getuid?.() === 0 ? ["--no-sandbox"] : [] });
  await idleServerShowsItsMemory({ browser, url });
  for (const prompt of ["What is the capital of Italy?", "What is the capital of Italy?", LOOP]) await ask(url, prompt);
  for (const [name, test] of Object.entries(TESTS)) {
    const started = performance.now();
    await test({ browser, url });
    console.log(`ok   ${name} (${((performance.now() - started) / 1000).toFixed(1)} s)`);
  }
  console.log(`${Object.keys(TESTS).length} tests passed`);
} finally {
  await browser?.close();
  server.kill("SIGINT");
  await new Promise((done) => (server.exitCode === null ? server.once("exit", done) : done()));
  if (!pictures.startsWith(work)) console.log(`screenshots: ${pictures}`);
  rmSync(work, { recursive: true, force: true });
}
