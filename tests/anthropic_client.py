"""Tests a running Steersman with Anthropic's Python package.

    python3 -m venv /tmp/anthropic && /tmp/anthropic/bin/pip install anthropic==2.12.0
    /tmp/anthropic/bin/python tests/anthropic_client.py http://127.0.0.1:11436 [API_KEY]

The server must serve the bundled model with the default policy. Prints the result of each check;
the exit code is nonzero if any failed.
"""

import sys

import anthropic
from anthropic import beta_tool

from sdk_checks import CITY, ROUNDS, check, run

QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
WEATHER_QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "name": "get_weather",
    "description": "get weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
# The package has no parameter for it.
GREEDY = {"temperature": 0}
THINKING = {"type": "enabled", "budget_tokens": 1024}

def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


@check
def plain_message_is_answered(client, model):
    message = client.messages.create(model=model, max_tokens=50, messages=QUESTION, extra_body=GREEDY)
    assert message.id.startswith("msg_") and message.model == model and message.role == "assistant", message
    assert [block.type for block in message.content] == ["text"] and "Rome" in text(message), message
    assert message.stop_reason == "end_turn" and message.stop_sequence is None, message
    usage = message.usage
    assert usage.output_tokens > 0 and usage.input_tokens + usage.cache_read_input_tokens > 5, usage


@check
def stream_equals_the_whole_message(client, model):
    asked = dict(model=model, max_tokens=2000, messages=QUESTION, extra_body=GREEDY, thinking=THINKING)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == text(final) == text(whole), (pieces, whole)
    assert [block.type for block in final.content] == ["thinking", "text"], final
    assert final.content[0].thinking == whole.content[0].thinking, (final, whole)
    assert final.content[0].signature and whole.content[0].signature, (final, whole)
    assert final.usage.output_tokens == whole.usage.output_tokens, (final.usage, whole.usage)
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    assert total(final.usage) == total(whole.usage), (final.usage, whole.usage)


@check
def raw_stream_has_all_events(client, model):
    stream = client.messages.create(model=model, max_tokens=50, messages=QUESTION, extra_body=GREEDY, stream=True)
    kinds = [event.type for event in stream]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
    assert {"content_block_start", "content_block_delta", "content_block_stop"} <= set(kinds), kinds


@check
def tools_are_called_in_several_rounds(client, model):
    messages = list(WEATHER_QUESTION)
    asked = dict(model=model, max_tokens=2000, tools=[WEATHER], extra_body=GREEDY)
    # The bundled model does not call a tool again of its own accord.
    for sky, choice in [("sunny", "auto"), ("rainy", "any")]:
        reply = client.messages.create(messages=messages, tool_choice={"type": choice}, **asked)
        assert reply.stop_reason == "tool_use", reply
        call = next(block for block in reply.content if block.type == "tool_use")
        assert call.name == "get_weather" and call.input == {"city": "Rome"}, call
        # Send the content back unchanged, as most agents do.
        result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky": "%s", "degrees": 21}' % sky}
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        final = client.messages.create(messages=messages, **asked)
        assert final.stop_reason == "end_turn" and sky in text(final), final
        messages += [{"role": "assistant", "content": final.content}, *WEATHER_QUESTION]


@check
def tools_are_called_in_twenty_rounds(client, model):
    seen = []

    @beta_tool(name="get_weather", description="get weather", input_schema=CITY)
    def weather(city):
        seen.append(city)
        return '{"round": %d}' % len(seen)

    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=2000, tools=[weather], messages=WEATHER_QUESTION, tool_choice={"type": "any"}, max_iterations=ROUNDS, extra_body=GREEDY
    )
    replies = list(runner)
    assert len(replies) == len(seen) == ROUNDS and {reply.stop_reason for reply in replies} == {"tool_use"}, replies[-1]
    assert replies[-1].usage.cache_read_input_tokens > 0, replies[-1]


@check
def tool_is_called_in_a_stream(client, model):
    asked = dict(model=model, max_tokens=2000, tools=[WEATHER], extra_body=GREEDY, messages=WEATHER_QUESTION)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    call = final.content[-1]
    assert final.stop_reason == "tool_use" and call.type == "tool_use", final
    assert call.name == "get_weather" and call.input == {"city": "Rome"}, call


@check
def limits_and_stop_sequences_have_their_reasons(client, model):
    cut = client.messages.create(model=model, max_tokens=2, messages=QUESTION, extra_body=GREEDY)
    assert cut.stop_reason == "max_tokens", cut
    stopped = client.messages.create(model=model, max_tokens=50, messages=QUESTION, extra_body=GREEDY, stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is"), stopped
    assert " is" not in text(stopped), stopped


@check
def tokens_are_counted_as_the_message_counts_them(client, model):
    asked = dict(model=model, messages=QUESTION, system="Be brief.")
    count = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(max_tokens=5, **asked).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens, (count, usage)


def rejected(kind, status, name, create):
    try:
        create()
    except kind as error:
        assert error.status_code == status and error.body["error"]["type"] == name, (error.status_code, error.body)
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def errors_have_the_types_of_the_package(client, model):
    create = lambda **more: client.messages.create(**{"model": model, "max_tokens": 5, "messages": QUESTION, **more})
    rejected(anthropic.NotFoundError, 404, "not_found_error", lambda: create(model="claude"))
    invalid = (anthropic.BadRequestError, 400, "invalid_request_error")
    error = rejected(*invalid, lambda: create(extra_body={"temperature": 3}))
    assert "temperature" in error.body["error"]["message"], error.body
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    error = rejected(*invalid, lambda: create(messages=[{"role": "user", "content": [image]}]))
    assert "messages[0].content[0]" in error.body["error"]["message"], error.body
    long = [{"role": "user", "content": "What is the capital of Italy? " * 15_000}]
    error = rejected(*invalid, lambda: create(messages=long))
    assert "prompt is too long" in error.body["error"]["message"], error.body


def main(url, key="none"):
    client = anthropic.Anthropic(base_url=url.rstrip("/"), api_key=key, max_retries=0, timeout=300)
    return run(anthropic, client, url)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
