// The requests: one as it runs, the lists, charts, search.

import assert from "node:assert/strict";
import { join } from "node:path";

import { OPERATOR, LOOP, pictures, ask, open, visit, say, check } from "./page.mjs";

/** Bytes of the first size in a text, as `1.5 MiB`. */
function size(text) {
  const [, value, unit] = text.match(/([\d.]+) ([KMG]?i?B)/);
  return value * 1024 ** ["B", "KiB", "MiB", "GiB"].indexOf(unit);
}

/** Before the server has answered a request: arrays are counted after the first pass, and accounts from the start. */
export async function idleServerShowsItsMemory({ browser, url }) {
  const { page, seen, context } = await open(browser, url, { key: OPERATOR });
  await page.waitForSelector(".empty:has-text('No requests are running'):visible");
  await page.waitForSelector("section:has(h2:text-is('Recent requests')) .empty:has-text('No request yet'):visible");
  await page.waitForSelector("#running-more:text-is('the server is idle')");
  const [{ bytes }] = (await (await fetch(`${url}/health`)).json()).engines;
  assert.ok(!bytes.arrays && bytes.weights > 1_000_000, JSON.stringify(bytes));
  const shown = await page.textContent("#memory");
  assert.ok(size(shown) > 0.9 * bytes.weights, shown);
  await check(page, seen, "an idle server");
  await context.close();
}

export default {
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
    await page.waitForFunction(() => document.querySelector(".replies")?.textContent?.includes("Its profile has trace_text"));
    await visit(page, "profiles");
    assert.match(await page.textContent("section[aria-labelledby=profile-default] .facts"), /Reply tokensno limit/);
    await visit(page, "policies");
    assert.ok((await page.textContent("section[aria-labelledby=policy-passthrough]")).includes("There is no earlier version to roll back to"));
    await visit(page, "models");
    await page.waitForSelector(".figure");
    const memory = await page.textContent("section[aria-labelledby=memory-title]");
    assert.ok(size(memory) >= size(memory.split("Weights")[1]), memory);
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
      await page.waitForFunction(() => document.querySelector(".chart .line")?.getAttribute("d")?.includes("L"));
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

  async "a request of a server that was started again does not have the link of an earlier one"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    let request;
    await page.route("**/v1/requests", async (route) => {
      const response = await route.fetch();
      const { requests } = await response.json();
      const ended = requests.find(({ phase }) => phase === "finished");
      return route.fulfill({ response, json: { requests: [{ ...ended, number: 1, ...request }] } });
    });
    const link = (id) => page.waitForFunction((id) => document.querySelector(".requests-table .what a")?.title === id, id);
    request = { id: "chatcmpl-of-the-first", arrived: 1_700_000_000 };
    await link(request.id);
    request = { id: "chatcmpl-of-the-second", arrived: 1_700_000_100 };
    await link(request.id);
    assert.equal(await page.locator(".requests-table tbody tr").count(), 1);
    assert.deepEqual(seen.errors, []);
    // The page asks again and again: an answer that is under way would fail with the page.
    await page.unrouteAll({ behavior: "wait" });
    await context.close();
  },

  async "samples that two views ask for at once are drawn once"({ browser, url }) {
    const { page, context } = await open(browser, url);
    const times = await page.evaluate(async () => {
      const { samples } = await import("/console/charts.js");
      const get = async () => ({ samples: [{ at: 1 }, { at: 2 }] });
      await Promise.all([samples.newest(get), samples.newest(get)]);
      return samples.list.map(({ at }) => at);
    });
    assert.deepEqual(times, [1, 2]);
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
    // One of many bytes is cut, and not refused each second.
    await page.fill("#search", "");
    await rows(id.slice(0, 18)).waitFor();
    await page.focus("#search");
    await page.keyboard.insertText("€".repeat(200));
    await page.waitForSelector(".empty:has-text('Nothing found'):visible");
    assert.ok(!seen.answers.includes("400 /v1/requests"));
    await page.fill("#search", "");
    await rows(id.slice(0, 18)).waitFor();
    await context.close();
  },

  async "the number of running requests says what some of them wait for"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    let counts;
    await page.route("**/health", async (route) => {
      const response = await route.fetch();
      const health = await response.json();
      Object.assign(health.engines[0], counts);
      return route.fulfill({ response, json: health });
    });
    for (const [reported, running, more] of [
      [{ running: 0 }, "0", "the server is idle"],
      [{ running: 3 }, "3", "none is paused"],
      [{ running: 3, awaiting_policy: 1, awaiting_prefix: 2, preempted: 1 }, "3", "1 waiting for a policy, 2 waiting for a prefix, 1 preempted"],
    ]) {
      counts = { awaiting_policy: 0, awaiting_prefix: 0, preempted: 0, ...reported };
      await page.waitForFunction(([running, more]) => document.querySelector("#running")?.textContent === running && document.querySelector("#running-more")?.textContent === more, [running, more]);
    }
    await check(page, seen, "requests that wait");
    // The page asks again and again: an answer that is under way would fail with the page.
    await page.unrouteAll({ behavior: "wait" });
    await context.close();
  },

  async "requests that run are listed with their phase"({ browser, url }) {
    const { page, seen, context } = await open(browser, url, { key: OPERATOR });
    // On a busy machine the page takes longer to open than a short reply to end.
    const long = { stream: true, ignore_eos: true, max_tokens: 30_000 };
    const replies = await Promise.all(["Rome", "Paris", "Lima"].map((town) => ask(url, `${LOOP} ${town}`, long)));
    await page.waitForSelector("tr:has(.chip.reasoning, .chip.answer) .rate");
    await page.waitForFunction(() => Number(document.querySelector("#running")?.textContent) > 0);
    await check(page, seen, "running requests");
    await page.screenshot({ path: join(pictures, "requests-running.png") });
    // Clients that hang up.
    await Promise.all(replies.map((reply) => reply.body.cancel()));
    await page.waitForSelector(".chip.cancelled");
    await context.close();
  },
};
