// Tests a running Steersman with Anthropic's npm package.
//
//     npm install --prefix tests --no-package-lock
//     node tests/anthropic_client.mjs http://127.0.0.1:11436 [API_KEY]
//
// The server must serve the bundled model with the default policy. Prints the result of each check; the exit code is
// nonzero if any failed.

import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema";

import { assert, CITY, QUESTION, rejected, ROUNDS, run, servedModel, server, WEATHER, WEATHER_QUESTION } from "./sdk_checks.mjs";

const { url, key } = server();
const client = new Anthropic({ baseURL: url, apiKey: key, authToken: null, maxRetries: 0, timeout: 300_000 });
const model = await servedModel({ url, key });

const user = (content) => [{ role: "user", content }];
const greedy = { model, max_tokens: 2000, temperature: 0 };
const tool = { name: WEATHER.name, description: WEATHER.description, input_schema: WEATHER.parameters };
const texts = (message) => message.content.filter(({ type }) => type === "text").map(({ text }) => text).join("");
const kinds = (message) => message.content.map(({ type }) => type);

async function served_model_is_listed() {
  const names = [];
  for await (const { id } of client.models.list()) names.push(id);
  assert(names.includes(model), `${names}`);
}

async function plain_message_is_answered() {
  const message = await client.messages.create({ ...greedy, max_tokens: 50, messages: user(QUESTION) });
  assert.deepEqual(kinds(message), ["text"]);
  assert.match(texts(message), /Rome/);
  assert.equal(message.stop_reason, "end_turn");
}

async function stream_equals_the_whole_message() {
  const body = { ...greedy, messages: user(QUESTION), thinking: { type: "enabled", budget_tokens: 1024 } };
  const whole = await client.messages.create(body);
  const pieces = { text: "", thinking: "" };
  const stream = client.messages.stream(body);
  stream.on("text", (text) => (pieces.text += text)).on("thinking", (text) => (pieces.thinking += text));
  const final = await stream.finalMessage();
  assert.deepEqual(kinds(final), ["thinking", "text"]);
  assert.deepEqual([pieces.text, pieces.thinking], [texts(final), final.content[0].thinking]);
  assert.deepEqual([texts(whole), whole.content[0].thinking], [texts(final), final.content[0].thinking]);
  assert(final.content[0].signature);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
}

async function tool_is_called_in_a_stream_and_its_result_is_used() {
  const messages = user(WEATHER_QUESTION);
  const reply = await client.messages.stream({ ...greedy, messages, tools: [tool] }).finalMessage();
  const call = reply.content.at(-1);
  assert.deepEqual([reply.stop_reason, call.name, call.input], ["tool_use", "get_weather", { city: "Rome" }]);
  messages.push({ role: "assistant", content: reply.content });
  const content = [{ type: "text", text: '{"sky": "sunny", "degrees": 21}' }];
  messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content }] });
  const final = await client.messages.create({ ...greedy, messages, tools: [tool] });
  assert.equal(final.stop_reason, "end_turn");
  assert.match(texts(final), /sunny/);
}

async function tools_are_called_in_twenty_rounds() {
  const seen = [];
  const run = ({ city }) => (seen.push(city), JSON.stringify({ round: seen.length }));
  const strict = betaTool({ name: tool.name, description: tool.description, inputSchema: CITY, strict: true, run });
  const runner = client.beta.messages.toolRunner({
    ...greedy,
    messages: user(WEATHER_QUESTION),
    tools: [strict],
    tool_choice: { type: "any" },
    stream: true,
    max_iterations: ROUNDS,
  });
  let last;
  for await (const stream of runner) {
    last = await stream.finalMessage();
    assert.equal(last.stop_reason, "tool_use");
  }
  assert.equal(seen.length, ROUNDS);
  assert(seen.every((city) => CITY.properties.city.enum.includes(city)), `${seen}`);
  assert(last.usage.cache_read_input_tokens > 0, JSON.stringify(last.usage));
}

async function answer_has_the_requested_type() {
  const output_config = { format: jsonSchemaOutputFormat(CITY) };
  const { parsed_output } = await client.messages.parse({ ...greedy, messages: user(QUESTION), output_config });
  assert(CITY.properties.city.enum.includes(parsed_output.city), JSON.stringify(parsed_output));
}

async function tokens_are_counted_as_the_message_counts_them() {
  const body = { model, messages: user(QUESTION), system: "Be brief." };
  const { input_tokens } = await client.messages.countTokens(body);
  const { usage } = await client.messages.create({ ...body, max_tokens: 5 });
  assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
}

async function errors_have_the_types_of_the_package() {
  const create = (more) => client.messages.create({ model, max_tokens: 5, messages: user(QUESTION), ...more });
  await rejected(Anthropic.NotFoundError, 404, () => create({ model: "claude" }));
  const invalid = async (more, words) => {
    const { error } = await rejected(Anthropic.BadRequestError, 400, () => create(more));
    assert.equal(error.error.type, "invalid_request_error");
    assert(error.error.message.includes(words), error.error.message);
  };
  await invalid({ temperature: 3 }, "temperature");
  const image = { type: "image", source: { type: "url", url: "http://localhost/x.png" } };
  await invalid({ messages: user([image]) }, "messages[0].content[0]");
  for (const stream of [false, true]) await invalid({ messages: user(QUESTION.repeat(15_000)), stream }, "prompt is too long");
}

async function request_is_cancelled() {
  const stream = client.messages.stream({ ...greedy, messages: user(QUESTION), thinking: { type: "adaptive" } });
  stream.on("streamEvent", () => stream.abort());
  await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
  const timed = client.messages.create({ ...greedy, messages: user(QUESTION) }, { timeout: 1 });
  await assert.rejects(timed, (error) => error instanceof Anthropic.APIConnectionTimeoutError || error.status === 504);
  await plain_message_is_answered();
}

await run("@anthropic-ai/sdk", [
  served_model_is_listed,
  plain_message_is_answered,
  stream_equals_the_whole_message,
  tool_is_called_in_a_stream_and_its_result_is_used,
  tools_are_called_in_twenty_rounds,
  answer_has_the_requested_type,
  tokens_are_counted_as_the_message_counts_them,
  errors_have_the_types_of_the_package,
  request_is_cancelled,
]);
