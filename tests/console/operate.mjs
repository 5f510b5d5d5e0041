// What operators change: keys, policies, models; and the log.

import assert from "node:assert/strict";
import { join } from "node:path";

import { ROOT, OPERATOR, CLIENT, SIZES, pictures, ask, open, enter, visit, check } from "./page.mjs";

export default {
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
      await page.waitForFunction(() => document.querySelector("#confirm-text")?.textContent === "`second` is the last key.");
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
    // Of the last, the page said that the server did not answer.
    for (const [key, words] of [["expired", message], ["wrong", "The server does not know this key."], ["sk-01234567…", "This is no key: it has characters that no key has."]]) {
      await page.fill("#key-input", key);
      await page.keyboard.press("Enter");
      await page.waitForFunction((words) => document.querySelector("#key-problem")?.textContent === words, words);
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
    await page.locator(".log-line.warn", { hasText: "invalid_api_key" }).first().waitFor();
    // The choice stays, and so do the lines.
    await page.reload();
    await page.locator(".log-line.warn", { hasText: "invalid_api_key" }).first().waitFor();
    assert.equal(await page.inputValue("#log-level"), "WARN");
    await page.selectOption("#log-level", "INFO");
    await line.first().waitFor();
    await page.fill("#log-filter", "no line has this");
    await page.waitForSelector(".empty:has-text('No line'):visible");
    await check(page, seen, "an empty log");
    await context.close();
  },

  async "who scrolls back in the log, with whatever, is not carried away"({ browser, url }) {
    const { page, context } = await open(browser, url, { key: OPERATOR, size: SIZES.phone });
    await visit(page, "log");
    const list = page.locator(".log-lines");
    await page.waitForFunction(() => {
      const shown = document.querySelector(".log-lines");
      return shown.scrollHeight > 2 * shown.clientHeight && shown.scrollTop > 0;
    });
    assert.ok(await page.isChecked("#log-follow"));
    // A finger or the bar.
    await list.evaluate((shown) => { shown.scrollTop = 0; });
    await page.waitForSelector("#log-follow:not(:checked)");
    const { id } = await ask(url, "What is the capital of Italy?");
    await page.locator(".log-line", { hasText: `id=${id}` }).waitFor();
    assert.equal(await list.evaluate((shown) => shown.scrollTop), 0);
    // A key.
    await page.check("#log-follow");
    await page.waitForFunction(() => document.querySelector(".log-lines").scrollTop > 0);
    await list.focus();
    await page.keyboard.press("PageUp");
    await page.waitForSelector("#log-follow:not(:checked)");
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
    // The page asks again and again: an answer that is under way would fail with the page.
    await page.unrouteAll({ behavior: "wait" });
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
    await page.waitForFunction(() => document.querySelector(".progress [role=status]")?.textContent?.startsWith("Not downloaded"));
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
    const status = (text) => page.waitForFunction((text) => document.querySelector(".progress [role=status]")?.textContent?.includes(text), text);
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

  async "models on the disk are listed anew when others are served"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    // By another operator, or not any more by a server that was started again.
    let by = null;
    let isFirst = true;
    await page.route("**/health", async (route) => {
      // The first change is made while the page opens.
      if (isFirst) {
        isFirst = false;
        await new Promise((done) => setTimeout(done, 500));
        by = "operator";
      }
      const response = await route.fetch();
      const health = await response.json();
      if (by) health.models.push({ ...health.models[0], model: "owner/spare", state: "on disk" });
      return route.fulfill({ response, json: health });
    });
    await page.route("**/v1/downloads", (route) => {
      const own = { model: "owner/spare", served_by: by, toml: "" };
      return route.fulfill({ contentType: "application/json", body: JSON.stringify({ models: [{ model: "owner/spare", bytes: 2048, complete: true, served: by !== null, models: [own] }] }) });
    });
    await visit(page, "models");
    const [load, stop] = ["Load owner/spare from the disk", "Stop serving owner/spare"].map((name) => page.getByRole("button", { name }));
    await stop.waitFor();
    by = null;
    await load.waitFor();
    by = "operator";
    await stop.waitFor();
    assert.deepEqual(seen.errors, []);
    // The page asks again and again: an answer that is under way would fail with the page.
    await page.unrouteAll({ behavior: "wait" });
    await context.close();
  },

  async "the hub is searched, and what was found is downloaded by clicking"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "models");
    const search = page.getByRole("button", { name: "Search", exact: true });
    await page.fill("#words", "qwen3");
    await search.click();
    // The server of the tests must not ask the hub.
    await page.waitForSelector(".notice:has-text('HF_HUB_OFFLINE forbids')");
    await check(page, seen, "a search that failed");
    // A hub is not needed to show what the server finds; tests/http/pull.rs has its answers.
    let asked;
    const model = (name, more) => ({ model: name, bytes: 2048, family: "qwen3", weights: "packed", supported: true, memory: 2304, fits: true, downloads: 12345, ...more });
    let models = [
      model("owner/small"),
      model("owner/large", { fits: false }),
      model("owner/other", { family: "florence2", supported: false, fits: false }),
      model("owner/unknown", { bytes: null, family: null, weights: null, supported: null, memory: null, fits: null, downloads: 0 }),
    ];
    await page.route("**/v1/search?*", (route) => {
      asked = new URL(route.request().url()).searchParams.get("words");
      return route.fulfill({ contentType: "application/json", body: JSON.stringify({ models }) });
    });
    await page.fill("#words", " qwen3 4bit&x ");
    await page.keyboard.press("Enter");
    const rows = page.locator("section[aria-labelledby=search-title] tbody tr");
    await rows.nth(3).waitFor();
    assert.equal(asked, "qwen3 4bit&x");
    assert.equal(await page.locator(".notice:has-text('HF_HUB_OFFLINE')").count(), 0);
    const cells = await rows.evaluateAll((rows) => rows.map((row) => [...row.cells].slice(0, 6).map((cell) => cell.textContent)));
    assert.deepEqual(cells, [
      ["owner/small", "2.0 KiB", "qwen3", "packed", "yes", "12,345"],
      ["owner/large", "2.0 KiB", "qwen3", "packed", "no", "12,345"],
      ["owner/other", "2.0 KiB", "florence2", "packed", "not supported", "12,345"],
      ["owner/unknown", "–", "–", "–", "–", "0"],
    ]);
    assert.ok(await page.getByRole("button", { name: "Download owner/other" }).isDisabled());
    await check(page, seen, "a search");
    await page.screenshot({ path: join(pictures, "models-search.png"), fullPage: true });
    let pulled;
    await page.route("**/v1/models/pull", (route) => {
      if (route.request().method() !== "POST") return route.fulfill({ contentType: "application/json", body: '{"running": null}' });
      pulled = route.request().postDataJSON().model;
      return route.fulfill({ contentType: "text/event-stream", body: 'data: {"status": "success", "folder": "/cache/small"}\n\n' });
    });
    await page.getByRole("button", { name: "Download owner/small" }).click();
    await page.waitForFunction(() => document.querySelector(".progress [role=status]")?.textContent?.includes("owner/small is in /cache/small"));
    assert.equal(pulled, "owner/small");
    models = [];
    await search.click();
    await page.waitForSelector("section[aria-labelledby=search-title] .empty:has-text('Nothing found'):visible");
    assert.equal(await rows.count(), 0);
    await page.unrouteAll({ behavior: "wait" });
    await context.close();
  },

  async "models on the disk are listed, served, loaded and removed by clicking"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    // No hub is reached: the cache is that of the machine, whose files no test removes.
    const toml = (model) => `[models."${model}"]\npath = "${model}"\n`;
    const own = (model, served_by = null) => ({ model, served_by, toml: toml(model) });
    let models = [
      { model: "owner/served", bytes: 4096, complete: true, served: true, models: [own("owner/served", "configuration")] },
      { model: "owner/spare", bytes: 2048, complete: true, served: false, models: [own("owner/spare")] },
      { model: "owner/half", bytes: 1024, complete: false, served: false, models: [] },
    ];
    // As the server does: what is served is not removed.
    const serving = [];
    await page.route("**/v1/models/serve", (route) => {
      const { model } = route.request().postDataJSON();
      const isServed = route.request().method() === "POST";
      serving.push([route.request().method(), model]);
      models = models.map((one) => (one.model === model ? { ...one, served: isServed, models: [own(model, isServed ? "operator" : null)] } : one));
      return route.fulfill({ contentType: "application/json", body: JSON.stringify({ model, served: isServed, toml: toml(model) }) });
    });
    const loads = [];
    await page.route("**/api/generate", (route) => {
      const { model, keep_alive: keepAlive } = route.request().postDataJSON();
      loads.push([model, keepAlive]);
      return route.fulfill({ contentType: "application/json", body: JSON.stringify({ model, done: true, done_reason: "load" }) });
    });
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
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
    await page.getByRole("button", { name: "Load owner/spare from the disk" }).click();
    await page.waitForSelector(".toast:text-is('owner/spare is loaded')");
    const stop = page.getByRole("button", { name: "Stop serving owner/spare" });
    await stop.waitFor();
    assert.deepEqual([serving, loads], [[["POST", "owner/spare"]], [["owner/spare", undefined]]]);
    assert.deepEqual(await rows.locator(".chip").allTextContents(), ["served", "served", "incomplete"]);
    assert.equal(await page.getByRole("button", { name: "Remove owner/spare" }).count(), 0);
    // The server forgets it when it ends: the lines for the configuration are copied.
    const disk = page.locator("section[aria-labelledby=disk-title]");
    await disk.locator(".copy").click();
    await disk.locator(".copy span:text-is('Copied')").waitFor();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), toml("owner/spare"));
    await check(page, seen, "a model of the disk that is served");
    await page.screenshot({ path: join(pictures, "models-served.png"), fullPage: true });
    await stop.click();
    await page.click("#confirm-yes");
    await page.waitForSelector(".toast:text-is('owner/spare is not served any more')");
    await page.getByRole("button", { name: "Load owner/spare from the disk" }).waitFor();
    assert.deepEqual(serving[1], ["DELETE", "owner/spare"]);
    assert.equal(await disk.locator(".copy").count(), 0);
    // What the server refuses is said, and nothing is loaded.
    await page.route("**/v1/models/serve", (route) => route.fulfill({ status: 400, contentType: "application/json", body: JSON.stringify({ error: { code: "invalid_value", message: "the family `x` is not supported" } }) }));
    await page.getByRole("button", { name: "Load owner/spare from the disk" }).click();
    await page.waitForSelector(".toast.bad:has-text('the family `x` is not supported')");
    await page.getByRole("button", { name: "Load owner/spare from the disk" }).and(page.locator(":enabled")).waitFor();
    assert.equal(loads.length, 1);
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
};
