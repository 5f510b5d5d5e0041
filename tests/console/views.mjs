// All views: who sees them, how they look, settings for clients, and the keyboard.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { chmodSync, mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";

import { BINARY, OPERATOR, CLIENT, LOOP, VIEWS, SIZES, PATIENCE, work, pictures, ask, run, open, enter, visit, check } from "./page.mjs";

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
  // One that prints no link would run for ever.
  const late = setTimeout(() => server.kill(), PATIENCE);
  let log = "";
  let link;
  for await (const line of createInterface({ input: server.stdout })) {
    log += `${line}\n`;
    link = line.match(/(http:\/\/[^\s/]+)(\/#\/enter\/[\w-]+)/);
    if (link) break;
  }
  clearTimeout(late);
  if (!link) throw new Error(`the server did not start:\n${log}`);
  // The end of the loop may pause the stream, and a full pipe would stop the server.
  server.stdout.resume();
  const [, url, path] = link;
  return { url, path, stop };
}

export default {
  async "the link that a server prints makes its owner an operator, once"({ browser }) {
    const own = await serveInTerminal();
    try {
      const { page, seen, context } = await open(browser, own.url, { path: own.path });
      const is = (page, words) => page.waitForFunction((words) => document.querySelector("#connection")?.textContent === words, words);
      await is(page, "Operator");
      assert.equal(page.url(), `${own.url}/#/requests`);
      assert.ok(!(await page.evaluate(() => document.documentElement.outerHTML)).includes(own.path.split("/").at(-1)));
      await page.reload();
      await is(page, "Operator");
      await visit(page, "keys");
      await page.waitForSelector("#key-name");
      await check(page, seen, "the console of its owner");
      // Opened again, it takes nobody's key away.
      await page.evaluate((hash) => { location.hash = hash; }, own.path.slice(1));
      await page.waitForSelector("#key-problem:visible");
      await page.click("#key-cancel");
      await is(page, "Operator");
      assert.equal(page.url(), `${own.url}/#/requests`);
      await visit(page, "keys");
      await page.waitForSelector("#key-name");
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
      CLAUDE_CODE_MAX_CONTEXT_TOKENS: String(limit.context),
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

  async "a time of another day has its date"({ browser, url }) {
    const { page, context } = await open(browser, url);
    const [now, earlier, day, none] = await page.evaluate(async () => {
      const { time } = await import("/console/dom.js");
      const before = new Date(Date.now() - 3 * 86_400_000);
      const day = [before.getFullYear(), before.getMonth() + 1, before.getDate()].map((part) => String(part).padStart(2, "0")).join("-");
      return [time(Date.now() / 1000), time(before / 1000), day, time(null)];
    });
    assert.match(now, /^\d\d:\d\d:\d\d$/);
    assert.match(earlier, /^\S+ \d\d:\d\d:\d\d$/);
    assert.deepEqual([earlier.split(" ")[0], none], [day, "–"]);
    await context.close();
  },

  async "a time never has sixty seconds or minutes"({ browser, url }) {
    const { page, context } = await open(browser, url);
    const texts = await page.evaluate(async () => {
      const { duration } = await import("/console/dom.js");
      return [60_000, 119_600, 3_599_900, 7_199_900].map(duration);
    });
    assert.deepEqual(texts, ["1 min 0 s", "1 min 59 s", "59 min 59 s", "1 h 59 min"]);
    await context.close();
  },

  async "an address that names no view shows the requests, and the other views still open"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    for (const hash of ["#/constructor", "#/toString/x", "#/__proto__", "#/%", "#/none"]) {
      await page.evaluate((hash) => { location.hash = hash; }, hash);
      await page.waitForSelector(".view.requests h1");
      await visit(page, "profiles");
    }
    await page.goto(`${url}/#/%`);
    await page.reload();
    await page.waitForSelector(".view.requests h1");
    assert.deepEqual(seen.errors, []);
    await context.close();
  },

  async "a server that does not answer, and answers again with other rights, is told"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    const is = (words) => page.waitForFunction((words) => document.querySelector("#connection")?.textContent === words, words);
    await visit(page, "keys");
    await page.waitForSelector("#key-name");
    await is("Operator");
    await page.fill("#key-name", "draft");
    await page.route("**/v1/**", (route) => route.abort());
    await is("No answer");
    await page.unrouteAll({ behavior: "wait" });
    await is("Operator");
    // The same server: the view stays as it was.
    assert.equal(await page.inputValue("#key-name"), "draft");
    const loading = { error: { code: "server_loading", message: "the models are still being loaded" } };
    await page.route("**/v1/**", (route) => route.fulfill({ status: 503, contentType: "application/json", body: JSON.stringify(loading) }));
    await is("Loading");
    await page.unrouteAll({ behavior: "wait" });
    await is("Operator");
    // As one that was started again, whose link another key belonged to.
    const refusal = { error: { code: "invalid_admin_key", message: "an operator's key is required" } };
    await page.route("**/v1/profiles", async (route) => {
      const response = await route.fetch();
      const body = await response.json();
      return route.fulfill({ response, json: { ...body, access: { ...body.access, key: "none" } } });
    });
    await page.route("**/v1/keys", (route) => route.fulfill({ status: 401, contentType: "application/json", body: JSON.stringify(refusal) }));
    await is("No key");
    await page.waitForSelector(".view.keys .notice:has-text('operator')");
    assert.equal(await page.locator("#key-name").count(), 0);
    await check(page, seen, "a server with other rights");
    await page.unrouteAll({ behavior: "wait" });
    await context.close();
  },

  async "a page that is opened while the server cannot answer says why, and opens by itself"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    for (const [code, message, shown] of [
      ["server_loading", "the models are still being loaded", "The server loads its model"],
      ["server_busy", "too many connections are open", "too many connections are open"],
    ]) {
      await page.route("**/v1/profiles", (route) => route.fulfill({ status: 503, contentType: "application/json", body: JSON.stringify({ error: { code, message } }) }));
      await page.reload();
      await page.waitForSelector(`main .notice .strong:text-is('${shown}')`);
      await check(page, seen, shown);
      await page.unrouteAll({ behavior: "wait" });
      await page.waitForSelector(".view.requests h1");
    }
    await context.close();
  },

  async "the refusal of a key that was changed meanwhile does not concern the new one"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    const refusal = { status: 401, contentType: "application/json", body: JSON.stringify({ error: { code: "invalid_api_key", message: "wrong key" } }) };
    let came;
    const asked = new Promise((done) => { came = done; });
    await page.route("**/v1/downloads", came);
    await visit(page, "models");
    const route = await asked;
    await page.click("#key");
    await enter(page, CLIENT);
    const isClient = () => page.waitForFunction(() => document.querySelector("#connection")?.textContent === "All profiles");
    await isClient();
    const arrived = page.waitForResponse("**/v1/downloads");
    await route.fulfill(refusal);
    await arrived;
    await visit(page, "profiles");
    await page.waitForSelector("#profile-agents");
    await isClient();
    assert.equal(await page.locator("#key-dialog[open]").count(), 0);
    assert.deepEqual(seen.errors, []);
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
    // Each request before this test has a link.
    const found = () => ["key", "theme"].every((id) => reached.has(id));
    for (let i = 0; i < 400 && !found(); i += 1) {
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
    // A policy closes its reasoning.
    const { id } = await ask(url, LOOP);
    for (const theme of ["light", "dark"]) {
      for (const [device, size] of Object.entries(SIZES)) {
        const { page, seen, context } = await open(browser, url, { size, theme, key: OPERATOR });
        for (const view of VIEWS) {
          await visit(page, view);
          await page.waitForFunction(() => document.querySelector(".view")?.textContent.length > 150);
          if (view !== "chat") await page.waitForSelector(".view dd, .view tbody td, .view .log-line");
          const name = `${view}-${theme}-${device}`;
          await check(page, seen, name);
          await page.screenshot({ path: join(pictures, `${name}.png`), fullPage: device === "phone" });
        }
        await page.evaluate((id) => { location.hash = `#/requests/${id}`; }, id);
        await page.waitForSelector(".mark, .records li");
        await check(page, seen, `life-${theme}-${device}`);
        await page.screenshot({ path: join(pictures, `life-${theme}-${device}.png`), fullPage: true });
        await context.close();
      }
    }
  },
};
