// All views: who sees them, how they look, and the keyboard.

import assert from "node:assert/strict";
import { join } from "node:path";

import { OPERATOR, CLIENT, VIEWS, SIZES, work, pictures, run, open, visit, check } from "./page.mjs";

export default {
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
      // What Python reads: the packages are tested by tests/*_client.py.
      await run("python3", ["-c", "import ast, sys; ast.parse(sys.argv[1])", texts[name]], env);
      assert.ok(texts[name].includes(`from ${package_} import`));
    }
    await run("python3", ["-c", "import sys, tomllib; assert tomllib.loads(sys.argv[1])['model_providers']['steersman']['wire_api'] == 'responses'", texts.Codex], env);
    for (const name of ["Claude Code", "aider"]) await run("sh", ["-n", "-c", texts[name]], env);
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
