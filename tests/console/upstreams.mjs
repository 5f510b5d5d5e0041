// What upstreams were used for, as the page of models has it: a second server asks the first one.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

import { OPERATOR, CLIENT, SIZES, work, pictures, ask, open, start, visit, check } from "./page.mjs";

const AGENTS = "agents-secret-key";
const MODEL = "work/tiny-hybrid-4bit";
const COLUMNS = ["Upstream", "Model", "Profile", "Key", "Requests", "Prompt tokens", "Reply tokens"];

/** A key as policies and metrics see it. */
const digits = (key) => createHash("sha256").update(key).digest("hex").slice(0, 16);

/** What the table says of these replies to one key. */
function expected(profile, key, usages) {
  const sum = (of) => usages.reduce((total, usage) => total + of(usage), 0);
  const cached = sum((usage) => usage.prompt_tokens_details.cached_tokens);
  const prompt = sum((usage) => usage.prompt_tokens);
  return ["work", "tiny-hybrid-4bit", profile, digits(key), String(usages.length),
    `${prompt}${cached ? `, ${cached} from its cache` : ""}`, String(sum((usage) => usage.completion_tokens))];
}

export default {
  async "tokens of upstreams are shown by model, profile and key"({ browser, url }) {
    const file = join(work, "upstream-key");
    writeFileSync(file, CLIENT);
    const second = await start("second", `
[server]
port = 0
api_keys = ["${CLIENT}"]
admin_keys = ["${OPERATOR}"]
[upstreams.work]
url = "${url}/v1"
key_file = "${file}"
[profiles.default]
policies = ["passthrough"]
upstreams = ["work"]
[profiles.agents]
policies = ["passthrough"]
upstreams = ["work"]
api_keys = ["${AGENTS}"]
`);
    try {
      const { page, seen, context } = await open(browser, second.url, { key: OPERATOR });
      await visit(page, "models");
      const section = page.locator("section[aria-labelledby=upstreams-title]");
      await section.locator("text=No request was sent to an upstream").waitFor();
      assert.equal(await section.locator(".scroll").isVisible(), false);

      const usage = async (question, key) => (await ask(second.url, question, { model: MODEL, max_tokens: 40 }, key)).usage;
      const ofClient = [];
      for (const country of ["Italy", "Norway"]) ofClient.push(await usage(`What is the capital of ${country}?`, CLIENT));
      const ofAgents = [await usage("What is the capital of France?", AGENTS)];
      const rows = section.locator("tbody tr");
      const wanted = [expected("default", CLIENT, ofClient), expected("agents", AGENTS, ofAgents)];
      // The most tokens first; the page reads again after some seconds.
      await rows.nth(1).waitFor();
      await page.waitForFunction((text) => document.querySelector(".upstreams-table tbody")?.textContent === text, wanted.flat().join(""));
      assert.deepEqual(await section.locator("th").allTextContents(), COLUMNS);
      for (const [index, cells] of wanted.entries()) assert.deepEqual(await rows.nth(index).locator("td").allTextContents(), cells);
      const today = [...ofClient, ...ofAgents].reduce((sum, one) => sum + one.prompt_tokens + one.completion_tokens, 0);
      await section.locator(`li:has-text("work"):has-text("0 running, 0 waiting, ${today.toLocaleString("en-US")} tokens today")`).waitFor();
      await check(page, seen, "the use of upstreams");
      await page.screenshot({ path: join(pictures, "upstreams.png"), fullPage: true });
      const html = await page.evaluate(() => document.documentElement.outerHTML);
      for (const key of [CLIENT, AGENTS]) assert.ok(!html.includes(key), "keys are shown by their digits only");
      await page.setViewportSize(SIZES.phone);
      await check(page, seen, "the use of upstreams on a phone");
      await context.close();
    } finally {
      await second.stop();
    }
  },

  async "names in metrics are read as they were written"({ browser, url }) {
    const { page, context } = await open(browser, url);
    const read = await page.evaluate(async () => {
      const { samples, use } = await import("/console/upstreams.js");
      const labels = String.raw`upstream="a\"b}",model="m\\n,x=\"1\"",profile="p\nq",key=""`;
      return use(samples([
        `steersman_upstream_requests_total{${labels}} 3`,
        `steersman_upstream_tokens_total{${labels},kind="reply_estimated"} 7`,
        `steersman_upstream_breaker{upstream="a\\"b}",state="open"} 1`,
        `steersman_upstream_breaker{upstream="a\\"b}",state="closed"} 0`,
        `steersman_upstream_requests_now{upstream="a\\"b}",state="waiting"} 2`,
        `steersman_tokens_total{model="m"} 9`,
      ].join("\n")));
    });
    assert.deepEqual(read.upstreams, [{ name: 'a"b}', breaker: "open", running: 0, waiting: 2, today: 0 }]);
    const [{ id, ...row }] = read.rows;
    assert.deepEqual(row, {
      upstream: 'a"b}', model: 'm\\n,x="1"', profile: "p\nq", key: "", requests: 3, failures: 0, prompt: 0, cached: 0, reply: 0, reply_estimated: 7,
    });
    assert.equal(read.rows.length, 1, id);
    await context.close();
  },
};
