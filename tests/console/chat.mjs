// The chat: replies, Markdown, conversations that stay, branches, files, search.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { OPERATOR, CLIENT, SIZES, pictures, open, enter, visit, answered, say, reply, check } from "./page.mjs";

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

export default {
  async "a chat is answered, and its reasoning can be turned off"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    await visit(page, "chat");
    const unset = await page.locator("#chat-temperature, #chat-max").evaluateAll((fields) => fields.map((field) => field.placeholder));
    assert.deepEqual(unset, ["default of the profile", "limit of the server"]);
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
    await page.waitForFunction(() => document.querySelector("#connection")?.textContent === "All profiles");
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
};
