"""Tests a running Steersman with Ollama's Python package, and with LangChain's classes for Ollama.

    python3 -m venv /tmp/ollama && /tmp/ollama/bin/pip install ollama==0.6.3 langchain-ollama==1.1.0
    /tmp/ollama/bin/python tests/ollama_client.py http://127.0.0.1:11436 "$(steersman keys create ollama --operator)"

The server must serve the bundled model with the default policy, and answer without a key. Prints the result of each check; the exit
code is nonzero if any failed.
"""

import sys

import ollama
from langchain_ollama import ChatOllama, OllamaEmbeddings

from sdk_checks import check, run

QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
GREEDY = {"temperature": 0}
#: The key of an operator, from the command line.
OPERATOR = ""
TEXTS = ["The capital of Italy is Rome.", "Rome is the capital of Italy.", "SELECT * FROM items"]


def get_weather(city: str) -> str:
    """get weather

    Args:
        city: a city

    Returns:
        the weather
    """
    return f"sunny in {city}"


def dot(one, other):
    return sum(x * y for x, y in zip(one, other))


def refused(status, words, ask):
    try:
        ask()
    except ollama.ResponseError as error:
        assert error.status_code == status and words in error.error, (error.status_code, error.error)
        return
    raise AssertionError("no error")


@check
def served_model_is_listed_and_described(client, model):
    [listed] = [one for one in client.list().models if one.model == model]
    assert listed.size > 1_000_000 and listed.details.quantization_level, listed
    assert model in [one.model for one in client.ps().models]
    shown = client.show(model)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities), shown
    assert shown.details.family == listed.details.family and shown.modelinfo, shown


@check
def chat_is_answered(client, model):
    reply = client.chat(model, QUESTION, think=False, options=GREEDY | {"num_ctx": 4096})
    assert reply.done and reply.done_reason == "stop" and reply.model == model, reply
    assert reply.message.role == "assistant" and "Rome" in reply.message.content and not reply.message.thinking, reply
    assert reply.prompt_eval_count > 0 and reply.eval_count > 0 and reply.total_duration > 0, reply


@check
def stream_of_a_chat_adds_up_to_it(client, model):
    whole = client.chat(model, QUESTION, think=True, options=GREEDY).message
    pieces = list(client.chat(model, QUESTION, think=True, options=GREEDY, stream=True))
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True], pieces
    thinking, content = ("".join(getattr(piece.message, field) or "" for piece in pieces) for field in ["thinking", "content"])
    assert (thinking, content) == (whole.thinking, whole.content) and thinking.strip() and "Rome" in content, pieces


@check
def tool_is_called_and_its_result_is_used(client, model):
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = dict(tools=[get_weather], think=False, options=GREEDY)
    reply = client.chat(model, messages, **asked).message
    [call] = reply.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"}), reply
    # Send the message back unchanged, as most agents do.
    result = {"role": "tool", "tool_name": "get_weather", "content": '{"sky": "sunny", "degrees": 21}'}
    final = client.chat(model, [*messages, reply, result], **asked).message
    assert "sunny" in final.content and not final.tool_calls, final


@check
def tool_is_called_in_a_stream(client, model):
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    stream = client.chat(model, messages, tools=[get_weather], think=False, options=GREEDY, stream=True)
    calls = [call.function for piece in stream for call in piece.message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", {"city": "Rome"})], calls


@check
def text_is_generated_and_has_a_form(client, model):
    reply = client.generate(model, "What is the capital of Spain?", think=False, options=GREEDY)
    assert "Madrid" in reply.response and reply.done_reason == "stop", reply
    cut = client.generate(model, "What is the capital of Spain?", think=False, options=GREEDY | {"num_predict": 2})
    assert cut.done_reason == "length" and cut.eval_count <= 2, cut
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    formed = client.chat(model, [{"role": "user", "content": "Say seven."}], format=schema, think=False, options=GREEDY)
    assert formed.message.content.replace(" ", "") == '{"n":7}', formed


@check
def texts_are_embedded(client, model):
    vectors = client.embed(model, TEXTS).embeddings
    assert len(vectors) == len(TEXTS) and all(abs(dot(vector, vector) - 1) < 1e-4 for vector in vectors)
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2]), vectors
    [alone] = client.embed(model, TEXTS[0]).embeddings
    older = client.embeddings(model, TEXTS[0]).embedding
    for other in [alone, older]:
        assert dot(other, vectors[0]) > 0.999 * dot(other, other) ** 0.5, other
    assert len(client.embed(model, TEXTS[0], dimensions=64).embeddings[0]) == 64


@check
def errors_are_those_of_the_package(client, model):
    refused(404, "llama3.2", lambda: client.chat("llama3.2", QUESTION))
    refused(404, "llama3.2", lambda: client.show("llama3.2"))
    refused(400, "num_ctxx", lambda: client.chat(model, QUESTION, options={"num_ctxx": 3}))
    refused(400, "images", lambda: client.chat(model, [{"role": "user", "content": "x", "images": ["aGk="]}]))
    # Operators alone may remove models.
    refused(401, "operator's key", lambda: client.delete("owner/none"))
    operator = ollama.Client(str(client._client.base_url), headers={"Authorization": f"Bearer {OPERATOR}"})
    refused(404, "owner/none", lambda: operator.delete("owner/none"))
    # In a stream, too.
    refused(404, "llama3.2", lambda: list(client.chat("llama3.2", QUESTION, stream=True)))


@check
def classes_of_langchain_work(client, model):
    url = str(client._client.base_url)
    vectors = OllamaEmbeddings(model=model, base_url=url)
    assert len(vectors.embed_documents(TEXTS)) == 3 and len(vectors.embed_query(TEXTS[0])) > 64
    chat = ChatOllama(model=model, base_url=url, temperature=0, reasoning=True, validate_model_on_init=True)
    reply = chat.invoke("What is the capital of Italy?")
    assert "Rome" in reply.content and reply.additional_kwargs["reasoning_content"].strip(), reply
    assert reply.usage_metadata["output_tokens"] > 0, reply
    plain = ChatOllama(model=model, base_url=url, temperature=0, reasoning=False)
    assert "Rome" in "".join(piece.content for piece in plain.stream("What is the capital of Italy?"))
    [call] = plain.bind_tools([get_weather]).invoke("What is the weather in Rome?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"}), call


def main(url, operator):
    global OPERATOR
    OPERATOR = operator
    client = ollama.Client(url, timeout=300)
    return run(ollama, client, url, client.list().models[0].model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
