"""Tests a running Steersman with OpenAI's Python package.

    python3 -m venv /tmp/openai && /tmp/openai/bin/pip install openai==3.52.0
    /tmp/openai/bin/python tests/openai_client.py http://127.0.0.1:11436 [API_KEY]

The server must serve the bundled model with the default policy. Prints the result of each check;
the exit code is nonzero if any failed.
"""

import json
import sys

import openai

from sdk_checks import CITY, ROUNDS, check, run, streamed_calls

QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "get weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

def reasoning(on):
    return {"chat_template_kwargs": {"enable_thinking": on}}


@check
def served_model_is_listed(client, model):
    names = [listed.id for listed in client.models.list()]
    assert model in names, names
    assert client.models.retrieve(model).id == model


@check
def plain_request_is_answered(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=50, extra_body=reasoning(False))
    choice, usage = reply.choices[0], reply.usage
    assert reply.id.startswith("chatcmpl-") and reply.model == model and reply.system_fingerprint
    assert choice.finish_reason == "stop", choice
    assert choice.message.role == "assistant" and "Rome" in choice.message.content, choice
    assert getattr(choice.message, "reasoning_content", None) is None, choice
    assert usage.completion_tokens_details.reasoning_tokens == 0, usage
    assert usage.prompt_tokens > 0 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens, usage


@check
def stream_has_reasoning_answer_and_usage(client, model):
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}, extra_body=reasoning(True)
    )
    reasoned, answer, reasons, usage = "", "", [], None
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = getattr(choice.delta, "reasoning_content", None)
            assert not (piece and answer), "reasoning after the answer"
            reasoned += piece or ""
            answer += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert reasoned.strip() and "Rome" in answer, (reasoned, answer)
    assert "think>" not in reasoned + answer, (reasoned, answer)
    assert reasons == ["stop"], reasons
    assert usage.completion_tokens_details.reasoning_tokens > 0, usage
    assert usage.completion_tokens > usage.completion_tokens_details.reasoning_tokens, usage


@check
def stream_equals_the_whole_reply(client, model):
    asked = dict(model=model, messages=QUESTION, temperature=0, reasoning_effort="none")
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **asked)]
    assert "".join(pieces) == whole, (pieces, whole)


@check
def max_tokens_ends_the_answer(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=2, extra_body=reasoning(False))
    assert reply.choices[0].finish_reason == "length", reply
    assert reply.usage.completion_tokens <= 2, reply


@check
def stop_string_ends_the_answer_and_is_not_part_of_it(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, stop=[" is"], extra_body=reasoning(False))
    content = reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop" and " is" not in content and "Rome" not in content, reply


@check
def tool_is_called_and_its_result_is_used(client, model):
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = dict(model=model, tools=[WEATHER], temperature=0, extra_body=reasoning(False))
    reply = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert reply.finish_reason == "tool_calls", reply
    call = reply.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "get_weather", call
    assert json.loads(call.function.arguments) == {"city": "Rome"}, call
    # Send the message back unchanged, as most agents do.
    messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny", "degrees": 21}'}]
    final = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert final.finish_reason == "stop" and "sunny" in final.message.content, final


@check
def tool_is_called_in_a_stream(client, model):
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    stream = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], temperature=0, stream=True, extra_body=reasoning(False))
    calls, reason = streamed_calls(stream)
    assert reason == "tool_calls" and list(calls) == [0], (reason, calls)
    assert calls[0][0] == "get_weather" and json.loads(calls[0][1]) == {"city": "Rome"}, calls


@check
def tools_are_called_in_twenty_rounds(client, model):
    tool = {"type": "function", "function": {**WEATHER["function"], "parameters": CITY, "strict": True}}
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = dict(model=model, tools=[tool], temperature=0, reasoning_effort="none")
    for round in range(ROUNDS):
        choice = "required" if round % 2 else {"type": "function", "function": {"name": "get_weather"}}
        # The package parses the arguments of strict tools, and its message has them when it is sent back.
        reply = client.chat.completions.parse(messages=messages, tool_choice=choice, **asked).choices[0]
        assert reply.finish_reason == "tool_calls", reply
        call = reply.message.tool_calls[0]
        assert call.function.parsed_arguments["city"] in CITY["properties"]["city"]["enum"], call
        messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": '{"round": %d}' % round}]
    usage = client.chat.completions.create(messages=messages, max_tokens=5, **asked).usage
    assert usage.prompt_tokens > 20 * ROUNDS and usage.prompt_tokens_details.cached_tokens > 0, usage


def rejected(kind, status, code, create):
    try:
        create()
    except kind as error:
        assert (error.status_code, error.code) == (status, code), (error.status_code, error.code)
        assert error.body["message"] and error.body["type"], error.body
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def errors_have_the_types_of_the_package(client, model):
    create = client.chat.completions.create
    rejected(openai.NotFoundError, 404, "model_not_found", lambda: create(model="gpt-4", messages=QUESTION))
    rejected(openai.BadRequestError, 400, "unsupported_parameter", lambda: create(model=model, messages=QUESTION, modalities=["audio"]))
    error = rejected(openai.BadRequestError, 400, "invalid_type", lambda: create(model=model, messages=[{"role": "user", "content": 3}]))
    assert error.param == "messages[0].content", error.param
    long = [{"role": "user", "content": "What is the capital of Italy? " * 15_000}]
    for stream in [False, True]:
        rejected(openai.BadRequestError, 400, "context_length_exceeded", lambda: create(model=model, messages=long, stream=stream))


@check
def choices_share_a_prompt(client, model):
    asked = dict(model=model, messages=QUESTION, temperature=1, seed=3, max_tokens=20, extra_body=reasoning(False))
    alone = client.chat.completions.create(**asked)
    reply = client.chat.completions.create(n=4, **asked)
    answers = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3], reply
    assert answers[0] == alone.choices[0].message.content, (answers, alone)
    assert reply.usage.prompt_tokens == alone.usage.prompt_tokens, (reply.usage, alone.usage)
    pieces = ["", "", "", ""]
    for chunk in client.chat.completions.create(n=4, stream=True, **asked):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == answers, (pieces, answers)


@check
def texts_are_embedded(client, model):
    texts = ["The capital of Italy is Rome.", "Rome is the capital of Italy.", "SELECT * FROM items"]
    reply = client.embeddings.create(model=model, input=texts)
    vectors = [item.embedding for item in reply.data]
    assert [item.index for item in reply.data] == [0, 1, 2] and reply.usage.prompt_tokens > 10, reply.usage
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert all(abs(dot(vector, vector) - 1) < 1e-4 for vector in vectors)
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2]), vectors
    floats = client.embeddings.create(model=model, input=texts[0], encoding_format="float").data[0].embedding
    assert all(abs(x - y) < 1e-4 for x, y in zip(floats, vectors[0])), floats
    few = client.embeddings.create(model=model, input=texts[0], dimensions=64).data[0].embedding
    assert len(few) == 64 and abs(dot(few, few) - 1) < 1e-4, few
    rejected(openai.BadRequestError, 400, "invalid_value", lambda: client.embeddings.create(model=model, input="a", dimensions=10**6))


@check
def raw_prompt_is_continued(client, model):
    asked = dict(model=model, temperature=0, max_tokens=8, stop=["\n"])
    prompt = "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    reply = client.completions.create(prompt=[prompt, prompt], echo=True, **asked)
    texts = [choice.text for choice in reply.choices]
    assert texts[0] == texts[1] and texts[0].startswith(prompt) and "Rome" in texts[0], reply
    assert [choice.index for choice in reply.choices] == [0, 1], reply
    assert reply.usage.completion_tokens <= 16, reply
    pieces = [chunk.choices[0].text for chunk in client.completions.create(prompt=prompt, stream=True, **asked)]
    assert prompt + "".join(pieces) == texts[0], (pieces, texts)


@check
def response_is_continued(client, model):
    asked = dict(model=model, temperature=0, reasoning={"effort": "none"})
    first = client.responses.create(input="What is the capital of Italy?", **asked)
    assert first.status == "completed" and "Rome" in first.output_text, first
    second = client.responses.create(input="What is the capital of Italy?", previous_response_id=first.id, **asked)
    assert second.usage.input_tokens > first.usage.input_tokens, (first.usage, second.usage)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    rejected(openai.NotFoundError, 404, "response_not_found", lambda: client.responses.retrieve(first.id))


@check
def stream_of_a_response_adds_up_to_it(client, model):
    with client.responses.stream(model=model, input="What is the capital of Italy?", temperature=0, reasoning={"effort": "low"}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    of = lambda kind: "".join(event.delta for event in events if event.type == kind)
    assert of("response.output_text.delta") == final.output_text and "Rome" in final.output_text, final
    assert [item.type for item in final.output] == ["reasoning", "message"], final
    assert of("response.reasoning_text.delta") == final.output[0].content[0].text, final
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(event.sequence_number for event in events)
    assert final.usage.output_tokens_details.reasoning_tokens > 0, final.usage


@check
def response_calls_tools_in_several_rounds(client, model):
    tool = {"type": "function", "strict": False, **WEATHER["function"]}
    items = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = dict(model=model, tools=[tool], temperature=0, reasoning={"effort": "none"})
    # The bundled model does not call a tool again of its own accord.
    for sky, choice in [("sunny", "auto"), ("rainy", "required")]:
        reply = client.responses.create(input=items, tool_choice=choice, **asked)
        call = reply.output[-1]
        assert call.type == "function_call" and call.name == "get_weather", reply
        assert json.loads(call.arguments) == {"city": "Rome"}, call
        # Send the items back unchanged, as most agents do.
        items += reply.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "%s", "degrees": 21}' % sky})
        final = client.responses.create(input=items, **asked)
        assert sky in final.output_text, final
        items += [*final.output, {"role": "user", "content": "What is the weather in Rome?"}]


@check
def timeout_of_the_client_ends_the_request(client, model):
    create = lambda **more: client.chat.completions.create(model=model, messages=QUESTION, **more)
    for asked in [dict(stream=False), dict(stream=True)]:
        rejected(openai.InternalServerError, 504, "deadline_exceeded", lambda: create(extra_headers={"X-Request-Timeout": "0.001"}, **asked))
    # The package sends its timeout itself.
    try:
        create(timeout=0.01)
    except (openai.APITimeoutError, openai.InternalServerError):
        return
    raise AssertionError("a reply within 10 ms")


@check
def client_may_close_a_stream(client, model):
    stream = client.chat.completions.create(model=model, messages=QUESTION, stream=True, extra_body=reasoning(True))
    next(iter(stream))
    stream.close()
    plain_request_is_answered(client, model)


def main(url, key="none"):
    client = openai.OpenAI(base_url=url.rstrip("/") + "/v1", api_key=key, max_retries=0, timeout=300)
    return run(openai, client, url)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
