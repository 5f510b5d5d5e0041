// Tests a running Steersman with the npm package `ai` and its provider for OpenAI's protocol.
//
//     npm install --prefix tests --no-package-lock
//     node tests/ai_client.mjs http://127.0.0.1:11436 [API_KEY]
//
// The server must serve the bundled model with the default policy. Prints the result of each check; the exit code is
// nonzero if any failed.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

import { assert, CITY, QUESTION, rejected, ROUNDS, run, servedModel, server, WEATHER, WEATHER_QUESTION } from "./sdk_checks.mjs";

const { url, key } = server();
const provider = createOpenAICompatible({
  name: "steersman",
  baseURL: `${url}/v1`,
  apiKey: key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const name = await servedModel({ url, key });
const model = provider.chatModel(name);

const effort = (reasoningEffort) => ({ providerOptions: { steersman: { reasoningEffort } } });
const quick = { model, temperature: 0, maxRetries: 0, ...effort("none") };
const weather = (parameters, execute) => ({
  get_weather: tool({ description: WEATHER.description, inputSchema: jsonSchema(parameters), strict: true, execute }),
});

async function plain_request_is_answered() {
  const { text, finishReason, usage } = await generateText({ ...quick, prompt: QUESTION, maxOutputTokens: 50 });
  assert.match(text, /Rome/);
  assert.equal(finishReason, "stop");
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
}

async function stream_has_reasoning_answer_and_usage() {
  const result = streamText({ ...quick, ...effort("low"), prompt: QUESTION });
  const pieces = { "reasoning-delta": "", "text-delta": "" };
  for await (const part of result.fullStream) {
    assert.notEqual(part.type, "error", String(part.error));
    if (part.type in pieces) pieces[part.type] += part.text;
  }
  assert.match(pieces["text-delta"], /Rome/);
  assert(pieces["reasoning-delta"].trim() && pieces["reasoning-delta"] === (await result.reasoningText));
  const { outputTokenDetails } = await result.usage;
  assert(outputTokenDetails.reasoningTokens > 0, JSON.stringify(outputTokenDetails));
}

async function tool_is_called_and_its_result_is_used() {
  const seen = [];
  const tools = weather(WEATHER.parameters, (given) => (seen.push(given), { sky: "sunny", degrees: 21 }));
  const { text } = await generateText({ ...quick, prompt: WEATHER_QUESTION, tools, stopWhen: stepCountIs(5) });
  assert.match(text, /sunny/);
  assert.deepEqual(seen, [{ city: "Rome" }]);
}

async function tools_are_called_in_twenty_rounds() {
  const seen = [];
  const tools = weather(CITY, ({ city }) => (seen.push(city), { round: seen.length }));
  const result = streamText({
    ...quick,
    prompt: WEATHER_QUESTION,
    tools,
    toolChoice: "required",
    stopWhen: stepCountIs(ROUNDS),
    onError: ({ error }) => assert.fail(error),
  });
  const steps = await result.steps;
  assert.deepEqual([steps.length, seen.length], [ROUNDS, ROUNDS]);
  assert(seen.every((city) => CITY.properties.city.enum.includes(city)), `${seen}`);
  assert(steps.at(-1).usage.inputTokenDetails.cacheReadTokens > 0, JSON.stringify(steps.at(-1).usage));
}

async function answer_has_the_requested_type() {
  const body = { ...quick, prompt: QUESTION, output: Output.object({ schema: jsonSchema(CITY) }) };
  const { output } = await generateText(body);
  assert(CITY.properties.city.enum.includes(output.city), JSON.stringify(output));
  let last;
  for await (const partial of streamText(body).partialOutputStream) last = partial;
  assert.deepEqual(last, output);
  const choice = await generateText({ ...body, output: Output.choice({ options: CITY.properties.city.enum }) });
  assert(CITY.properties.city.enum.includes(choice.output), choice.output);
}

async function raw_prompt_is_continued() {
  const prompt = "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
  const body = { model: provider.completionModel(name), temperature: 0, maxRetries: 0, maxOutputTokens: 8 };
  const { text } = await generateText({ ...body, prompt, stopSequences: ["\n"] });
  assert(text.trim(), text);
}

async function texts_are_embedded() {
  const values = ["The capital of Italy is Rome.", "SELECT * FROM items"];
  const { embeddings } = await embedMany({ model: provider.embeddingModel(name), values });
  assert.equal(embeddings.length, 2);
  assert(embeddings.every((vector) => Math.abs(vector.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4));
}

async function errors_have_the_type_of_the_package() {
  const create = (more) => generateText({ ...quick, prompt: QUESTION, ...more });
  const missing = await rejected(APICallError, 404, () => create({ model: provider.chatModel("gpt-4") }));
  assert.equal(missing.data.error.code, "model_not_found");
  const wrong = await rejected(APICallError, 400, () => create({ temperature: 3 }));
  assert.equal(wrong.data.error.param, "temperature");
  const long = await rejected(APICallError, 400, () => create({ prompt: QUESTION.repeat(15_000) }));
  assert.equal(long.data.error.code, "context_length_exceeded");
}

async function request_is_cancelled() {
  const controller = new AbortController();
  const body = { ...quick, ...effort("high"), prompt: QUESTION, abortSignal: controller.signal };
  const kinds = [];
  for await (const { type } of streamText(body).fullStream) {
    kinds.push(type);
    controller.abort();
  }
  assert(kinds.includes("abort") && !kinds.includes("finish"), `${kinds}`);
  await plain_request_is_answered();
}

await run("ai", [
  plain_request_is_answered,
  stream_has_reasoning_answer_and_usage,
  tool_is_called_and_its_result_is_used,
  tools_are_called_in_twenty_rounds,
  answer_has_the_requested_type,
  raw_prompt_is_continued,
  texts_are_embedded,
  errors_have_the_type_of_the_package,
  request_is_cancelled,
]);
