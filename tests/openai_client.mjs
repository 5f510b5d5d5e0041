// Tests a running Steersman with OpenAI's npm package.
//
//     npm install --prefix tests --no-package-lock
//     node tests/openai_client.mjs http://127.0.0.1:11436 [API_KEY]
//
// The server must serve the bundled model with the default policy. Prints the result of each check; the exit code is
// nonzero if any failed.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { assert, CITY, QUESTION, rejected, ROUNDS, run, servedModel, server, WEATHER, WEATHER_QUESTION } from "./sdk_checks.mjs";

const { url, key } = server();
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 300_000 });
const model = await servedModel({ url, key });

const user = (content) => [{ role: "user", content }];
const tool = { type: "function", function: WEATHER };
const quick = { model, temperature: 0, reasoning_effort: "none" };
const Place = z.object({ city: z.enum(["Rome", "Paris"]) });
const isPlace = (place) => assert.equal(Place.safeParse(place).success, true, JSON.stringify(place));

async function served_model_is_listed() {
  const names = [];
  for await (const listed of client.models.list()) names.push(listed.id);
  assert(names.includes(model), `${names}`);
  assert.equal((await client.models.retrieve(model)).id, model);
}

async function plain_request_is_answered() {
  const { choices, usage } = await client.chat.completions.create({ ...quick, messages: user(QUESTION), max_tokens: 50 });
  assert.equal(choices[0].finish_reason, "stop");
  assert.match(choices[0].message.content, /Rome/);
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
}

async function stream_has_reasoning_answer_and_usage() {
  const body = { model, temperature: 0, messages: user(QUESTION), reasoning_effort: "low" };
  const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
  let [reasoning, answer, ends] = ["", "", []];
  for await (const { choices } of stream) {
    for (const { delta, finish_reason } of choices) {
      assert(!(delta.reasoning_content && answer), "reasoning after the answer");
      reasoning += delta.reasoning_content ?? "";
      answer += delta.content ?? "";
      if (finish_reason) ends.push(finish_reason);
    }
  }
  assert(reasoning.trim() && !/think>/.test(reasoning + answer), reasoning + answer);
  assert.match(answer, /Rome/);
  assert.deepEqual(ends, ["stop"]);
  assert.equal(await stream.finalContent(), answer);
  const { usage } = await stream.finalChatCompletion();
  assert(usage.completion_tokens_details.reasoning_tokens > 0, JSON.stringify(usage));
}

async function tool_is_called_and_its_result_is_used() {
  const seen = [];
  const weather = (given) => (seen.push(given), { sky: "sunny", degrees: 21 });
  const runner = client.chat.completions.runTools({
    ...quick,
    messages: user(WEATHER_QUESTION),
    tools: [{ type: "function", function: { ...WEATHER, parse: JSON.parse, function: weather } }],
  });
  assert.match(await runner.finalContent(), /sunny/);
  assert.deepEqual(seen, [{ city: "Rome" }]);
}

async function tool_is_called_in_a_stream() {
  const stream = client.chat.completions.stream({ ...quick, messages: user(WEATHER_QUESTION), tools: [tool] });
  const { choices } = await stream.finalChatCompletion();
  const [call, ...others] = choices[0].message.tool_calls;
  assert.deepEqual([choices[0].finish_reason, call.function.name, others], ["tool_calls", "get_weather", []]);
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Rome" });
}

async function tools_are_called_in_twenty_rounds() {
  const seen = [];
  const weather = (given) => (seen.push(given.city), { round: seen.length });
  const strict = { ...WEATHER, parameters: CITY, strict: true, parse: JSON.parse, function: weather };
  const body = { ...quick, messages: user(WEATHER_QUESTION), tools: [{ type: "function", function: strict }] };
  const forced = { ...body, stream: true, tool_choice: "required" };
  const runner = client.chat.completions.runTools(forced, { maxChatCompletions: ROUNDS });
  await runner.done();
  assert.equal(seen.length, ROUNDS);
  assert(seen.every((city) => CITY.properties.city.enum.includes(city)), `${seen}`);
  // The package adds `parsed_arguments` to the calls of strict tools.
  const { usage } = await client.chat.completions.create({ ...body, messages: runner.messages, max_tokens: 5 });
  assert(usage.prompt_tokens > 20 * ROUNDS && usage.prompt_tokens_details.cached_tokens > 0, JSON.stringify(usage));
}

async function answer_has_the_requested_type() {
  const body = { ...quick, messages: user(QUESTION), response_format: zodResponseFormat(Place, "place") };
  const reply = await client.chat.completions.parse(body);
  isPlace(reply.choices[0].message.parsed);
  const streamed = await client.chat.completions.stream(body).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, reply.choices[0].message.parsed);
  const loose = await client.chat.completions.create({ ...body, response_format: { type: "json_object" }, max_tokens: 30 });
  assert.match(loose.choices[0].message.content, /^\s*\{/);
}

async function texts_are_embedded() {
  const texts = ["The capital of Italy is Rome.", "SELECT * FROM items"];
  // The package asks for base64 and decodes it.
  const { data } = await client.embeddings.create({ model, input: texts });
  const floats = await client.embeddings.create({ model, input: texts, encoding_format: "float" });
  data.forEach(({ embedding, index }) => {
    const other = floats.data[index].embedding;
    assert(embedding.length === other.length && embedding.every((x, k) => Math.abs(x - other[k]) < 1e-4));
  });
}

async function response_is_continued_and_streamed() {
  const body = { model, temperature: 0, reasoning: { effort: "none" }, input: QUESTION };
  const first = await client.responses.create(body);
  assert.match(first.output_text, /Rome/);
  const second = await client.responses.create({ ...body, previous_response_id: first.id });
  assert(second.usage.input_tokens > first.usage.input_tokens);
  const stream = client.responses.stream({ ...body, reasoning: { effort: "low" } });
  const pieces = { "response.output_text.delta": "", "response.reasoning_text.delta": "" };
  for await (const event of stream) if (event.type in pieces) pieces[event.type] += event.delta;
  const final = await stream.finalResponse();
  assert.deepEqual(final.output.map(({ type }) => type), ["reasoning", "message"]);
  assert.equal(pieces["response.output_text.delta"], final.output_text);
  assert.equal(pieces["response.reasoning_text.delta"], final.output[0].content[0].text);
  await client.responses.delete(first.id);
  await rejected(OpenAI.NotFoundError, 404, () => client.responses.retrieve(first.id));
}

async function response_has_the_requested_type() {
  const text = { format: zodTextFormat(Place, "place") };
  const reply = await client.responses.parse({ model, temperature: 0, reasoning: { effort: "none" }, input: QUESTION, text });
  isPlace(reply.output_parsed);
}

async function response_calls_tools_in_twenty_rounds() {
  const tools = [{ type: "function", ...WEATHER, parameters: CITY, strict: true }];
  const input = user(WEATHER_QUESTION);
  for (let round = 0; round < ROUNDS; round += 1) {
    const body = { model, temperature: 0, reasoning: { effort: "none" }, tools, tool_choice: "required", input, store: false };
    const reply = await (round % 2 ? client.responses.stream(body).finalResponse() : client.responses.create(body));
    const call = reply.output.at(-1);
    assert.deepEqual([call.type, call.name], ["function_call", "get_weather"], JSON.stringify(reply.output));
    assert(CITY.properties.city.enum.includes(JSON.parse(call.arguments).city), call.arguments);
    input.push(...reply.output, { type: "function_call_output", call_id: call.call_id, output: `{"round": ${round}}` });
  }
}

async function errors_have_the_types_of_the_package() {
  const create = (more) => client.chat.completions.create({ model, messages: user(QUESTION), ...more });
  const missing = await rejected(OpenAI.NotFoundError, 404, () => create({ model: "gpt-4" }));
  assert.equal(missing.code, "model_not_found");
  const audio = await rejected(OpenAI.BadRequestError, 400, () => create({ modalities: ["audio"] }));
  assert.deepEqual([audio.code, audio.param], ["unsupported_parameter", "modalities"]);
  const wrong = await rejected(OpenAI.BadRequestError, 400, () => create({ messages: user(3) }));
  assert.equal(wrong.param, "messages[0].content");
  const uniqueItems = { type: "object", properties: { a: { type: "array", uniqueItems: true } } };
  const response_format = { type: "json_schema", json_schema: { name: "x", schema: uniqueItems } };
  const schema = await rejected(OpenAI.BadRequestError, 400, () => create({ response_format }));
  assert.equal(schema.param, "response_format.json_schema.schema.properties.a.uniqueItems");
  for (const stream of [false, true]) {
    const long = await rejected(OpenAI.BadRequestError, 400, () => create({ messages: user(QUESTION.repeat(15_000)), stream }));
    assert.equal(long.code, "context_length_exceeded");
  }
}

async function request_is_cancelled() {
  const stream = await client.chat.completions.create({ model, messages: user(QUESTION), stream: true, reasoning_effort: "high" });
  for await (const _ of stream) break;
  const controller = new AbortController();
  const running = client.responses.stream({ model, input: QUESTION, reasoning: { effort: "high" } }, { signal: controller.signal });
  running.on("event", () => controller.abort());
  await assert.rejects(running.finalResponse(), OpenAI.APIUserAbortError);
  const timed = client.chat.completions.create({ model, messages: user(QUESTION) }, { timeout: 1 });
  await assert.rejects(timed, (error) => error instanceof OpenAI.APIConnectionTimeoutError || error.status === 504);
  await plain_request_is_answered();
}

await run("openai", [
  served_model_is_listed,
  plain_request_is_answered,
  stream_has_reasoning_answer_and_usage,
  tool_is_called_and_its_result_is_used,
  tool_is_called_in_a_stream,
  tools_are_called_in_twenty_rounds,
  answer_has_the_requested_type,
  texts_are_embedded,
  response_is_continued_and_streamed,
  response_has_the_requested_type,
  response_calls_tools_in_twenty_rounds,
  errors_have_the_types_of_the_package,
  request_is_cancelled,
]);
