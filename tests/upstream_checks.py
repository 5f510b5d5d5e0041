"""What the packages `openai` and `anthropic` see of a model of an upstream: chats, streams, tools, forms, reasoning.

Each check is a function of a client and a `Target`; `OPENAI` and `ANTHROPIC` list them.
"""

import json
from dataclasses import dataclass

import anthropic
import openai

from sdk_checks import CITY, streamed_calls

QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
CITIES = [{"role": "user", "content": "What is the weather in Rome and in Paris?"}]
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "get weather", "parameters": PLACE}
OPENAI_TOOL = {"type": "function", "function": FUNCTION}
ANTHROPIC_TOOL = {"name": "get_weather", "description": "get weather", "input_schema": PLACE}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY, "strict": True}}
RESULT = '{"sky": "sunny", "degrees": 21}'
#: The package of Anthropic has no parameter for it.
GREEDY = {"temperature": 0}
THINKING, SILENT = {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}


@dataclass
class Target:
    """A model as clients name it, and what its upstream can."""

    model: str
    #: Whether its reasoning has a text.
    shows_reasoning: bool = True
    has_forms: bool = True
    #: Whether it calls a tool that it must call.
    obeys_choice: bool = True
    #: Whether it calls several tools at once when it is asked to.
    calls_twice: bool = False


OPENAI, ANTHROPIC = [], []


def openai_check(function):
    """Adds a check of OpenAI's package."""
    OPENAI.append(function)
    return function


def anthropic_check(function):
    """Adds a check of Anthropic's package."""
    ANTHROPIC.append(function)
    return function


def refused(kind, field, create):
    """The error of a request that is refused with 400 for this field."""
    try:
        create()
    except kind as error:
        assert error.status_code == 400 and field in str(error.body), (error.status_code, error.body)
        return
    raise AssertionError(f"`{field}` was not refused")


@openai_check
def chat_is_answered(client, target):
    reply = client.chat.completions.create(
        model=target.model, messages=QUESTION, temperature=0, max_tokens=50, reasoning_effort="none")
    [choice], usage = reply.choices, reply.usage
    assert choice.finish_reason == "stop" and "Rome" in choice.message.content, reply
    assert not getattr(choice.message, "reasoning_content", None), reply
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


@openai_check
def stream_equals_the_chat(client, target):
    asked = dict(model=target.model, messages=QUESTION, temperature=0, reasoning_effort="none")
    whole = client.chat.completions.create(**asked)
    answer, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert answer == whole.choices[0].message.content and reasons == ["stop"], (answer, whole)
    assert usage.completion_tokens == whole.usage.completion_tokens, (usage, whole.usage)


@openai_check
def limit_is_kept(client, target):
    reply = client.chat.completions.create(
        model=target.model, messages=QUESTION, temperature=0, max_tokens=2, reasoning_effort="none")
    assert reply.choices[0].finish_reason == "length" and "Rome" not in reply.choices[0].message.content, reply
    assert reply.usage.completion_tokens <= 2, reply


@openai_check
def reasoning_is_told_apart(client, target):
    asked = dict(model=target.model, messages=QUESTION, temperature=0, reasoning_effort="low")
    reply = client.chat.completions.create(**asked)
    message, usage = reply.choices[0].message, reply.usage
    reasoning = getattr(message, "reasoning_content", None) or ""
    assert "Rome" in message.content and "think>" not in message.content + reasoning, reply
    assert bool(reasoning.strip()) == target.shows_reasoning, reply
    # A server that does not count its reasoning has it counted here, if it shows it.
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens, usage
    streamed, answer = "", ""
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            piece = getattr(choice.delta, "reasoning_content", None)
            assert not (piece and answer), "reasoning after the answer"
            streamed += piece or ""
            answer += choice.delta.content or ""
    assert (streamed, answer) == (reasoning, message.content), (streamed, answer, reply)


@openai_check
def tool_is_called_and_its_result_is_used(client, target):
    for effort in ["none", "low"]:
        messages = list(WEATHER)
        asked = dict(model=target.model, tools=[OPENAI_TOOL], temperature=0, reasoning_effort=effort)
        reply = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert reply.finish_reason == "tool_calls", reply
        [call] = reply.message.tool_calls
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Rome"}, call
        messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        final = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert final.finish_reason == "stop" and "sunny" in final.message.content, final


@openai_check
def tool_is_called_in_a_stream(client, target):
    expected = ["Rome", "Paris"] if target.calls_twice else ["Rome"]
    stream = client.chat.completions.create(
        model=target.model, messages=CITIES if target.calls_twice else WEATHER, tools=[OPENAI_TOOL], temperature=0,
        stream=True, reasoning_effort="none")
    calls, reason = streamed_calls(stream)
    assert reason == "tool_calls" and sorted(calls) == list(range(len(expected))), (reason, calls)
    assert all(name == "get_weather" for name, _ in calls.values()), calls
    assert [json.loads(arguments)["city"] for _, arguments in calls.values()] == expected, calls


@openai_check
def tool_that_must_be_called_is_called(client, target):
    for choice in ["required", {"type": "function", "function": {"name": "get_weather"}}]:
        create = lambda: client.chat.completions.create(
            model=target.model, messages=WEATHER, tools=[OPENAI_TOOL], temperature=0, tool_choice=choice,
            reasoning_effort="none")
        if not target.obeys_choice:
            refused(openai.BadRequestError, "tool_choice", create)
            continue
        reply = create().choices[0]
        assert reply.finish_reason == "tool_calls" and "Rome" in reply.message.tool_calls[0].function.arguments, reply


@openai_check
def answer_has_its_form(client, target):
    create = lambda **more: client.chat.completions.create(
        model=target.model, messages=QUESTION, temperature=0, max_tokens=200, response_format=FORM, **more)
    if not target.has_forms:
        return refused(openai.BadRequestError, "response_format", lambda: create(reasoning_effort="none"))
    for effort in ["none", "low"]:
        content = create(reasoning_effort=effort).choices[0].message.content
        assert json.loads(content)["city"] in CITY["properties"]["city"]["enum"], content


@openai_check
def response_is_streamed(client, target):
    asked = dict(model=target.model, input="What is the capital of Italy?", temperature=0, reasoning={"effort": "none"})
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text and "Rome" in text, final
    assert final.usage.input_tokens > 0 and final.usage.output_tokens > 0, final.usage


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


@anthropic_check
def message_is_answered(client, target):
    message = client.messages.create(
        model=target.model, max_tokens=50, messages=QUESTION, thinking=SILENT, extra_body=GREEDY)
    assert [block.type for block in message.content] == ["text"] and "Rome" in text(message), message
    assert message.stop_reason == "end_turn", message
    usage = message.usage
    assert usage.output_tokens > 0 and usage.input_tokens + usage.cache_read_input_tokens > 5, usage


@anthropic_check
def message_is_limited(client, target):
    message = client.messages.create(
        model=target.model, max_tokens=2, messages=QUESTION, thinking=SILENT, extra_body=GREEDY)
    assert message.stop_reason == "max_tokens" and "Rome" not in text(message), message


@anthropic_check
def stream_with_thinking_equals_the_message(client, target):
    asked = dict(model=target.model, max_tokens=2000, messages=QUESTION, extra_body=GREEDY, thinking=THINKING)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == text(final) == text(whole) and "Rome" in pieces, (pieces, whole)
    kinds = ["thinking", "text"] if target.shows_reasoning else ["text"]
    assert [block.type for block in final.content] == [block.type for block in whole.content] == kinds, final
    if target.shows_reasoning:
        assert final.content[0].thinking == whole.content[0].thinking != "", (final, whole)
    assert final.usage.output_tokens == whole.usage.output_tokens, (final.usage, whole.usage)


@anthropic_check
def tool_is_used_and_its_result_is_told(client, target):
    for thinking in [SILENT, THINKING]:
        messages = list(WEATHER)
        asked = dict(
            model=target.model, max_tokens=2000, tools=[ANTHROPIC_TOOL], extra_body=GREEDY, thinking=thinking)
        with client.messages.stream(messages=messages, **asked) as stream:
            reply = stream.get_final_message()
        assert reply.stop_reason == "tool_use", reply
        call = next(block for block in reply.content if block.type == "tool_use")
        assert call.name == "get_weather" and call.input == {"city": "Rome"}, call
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        final = client.messages.create(messages=messages, **asked)
        assert final.stop_reason == "end_turn" and "sunny" in text(final), final


@anthropic_check
def message_has_its_form(client, target):
    form = {"output_config": {"format": {"type": "json_schema", "schema": CITY}}}
    create = lambda: client.messages.create(
        model=target.model, max_tokens=200, messages=QUESTION, thinking=SILENT, extra_body=GREEDY | form)
    if not target.has_forms:
        return refused(anthropic.BadRequestError, "output_config", create)
    content = text(create())
    assert json.loads(content)["city"] in CITY["properties"]["city"]["enum"], content


def run(clients, target):
    """Runs all checks, and returns the names of those that failed, with their errors."""
    failures = []
    for client, checks in zip(clients, (OPENAI, ANTHROPIC)):
        for check in checks:
            try:
                check(client, target)
            except Exception as error:
                failures.append(f"{target.model}: {check.__name__.replace('_', ' ')}: {type(error).__name__}: {error}")
    return failures
