// A reply of a model to a conversation, as it streams.

import { events, get } from "./api.js";
import { number } from "./dom.js";

/**
 * Reads the reply to `body` into `message`; `changed` is called after each piece. Errors become
 * part of the message.
 */
export async function receive({ body, headers }, message, signal, changed) {
  const started = performance.now();
  let first = 0;
  let usage = null;
  try {
    for await (const { data } of events("/v1/chat/completions", { body, headers, signal })) {
      if (data.error) throw new Error(data.error.message);
      message.request = data.id ?? message.request;
      const delta = data.choices?.[0]?.delta ?? {};
      if (!first && (delta.content || delta.reasoning_content)) first = performance.now();
      message.reasoning += delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      for (const call of delta.tool_calls ?? []) {
        const { name, arguments: part = "" } = call.function ?? {};
        message.content += name ? `\n[calls ${name}] ${part}` : part;
      }
      if (data.steersman?.notes) message.notes = data.steersman.notes;
      if (data.usage) usage = data.usage;
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.foot = "Stopped. ";
    else message.error = error.message;
  }
  if (!usage) return;
  const known = await listed(message.request).catch(() => null);
  const own =
    usage.completion_tokens / Math.max((performance.now() - (first || started)) / 1000, 0.001);
  message.foot = summary(
    usage,
    known?.reply_tokens ?? usage.completion_tokens,
    known?.tokens_per_second ?? own,
  );
}

/**
 * The request as the view of requests shows it, so that both have the same figures; ids are known
 * to operators only.
 */
async function listed(id) {
  const { requests } = await get("/v1/requests");
  return requests.find((request) => request.id === id);
}

function summary(usage, tokens, rate) {
  const reasoning = usage.completion_tokens_details?.reasoning_tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return [
    `${number(tokens)} tokens`,
    reasoning ? `, ${number(reasoning)} of them reasoning` : "",
    `, ${rate.toFixed(1)} tokens/s; `,
    `prompt ${number(usage.prompt_tokens)}, ${number(cached)} from the cache.`,
  ].join("");
}
