"""What clients see of an upstream that fails, in both packages, and what must not be seen: its key."""

import json
import time
import urllib.error
import urllib.request

import anthropic
import openai

from upstream_checks import OPENAI_TOOL, QUESTION, SILENT, WEATHER, text
from upstream_script import ANSWER, FAULTS, VENDORS

#: Characters of a key in a row that are a leak.
PART = 6
PAGES = [
    "/", "/health", "/metrics", "/v1/models", "/v1/profiles", "/v1/policies", "/v1/requests", "/v1/history", "/v1/log",
    "/v1/cache", "/v1/keys", "/api/tags", "/api/ps",
]
#: By fault: status and code of the error of a request that is not streamed, whether a stream has begun before, and
#: how often the upstream was asked for both. A retry is allowed, and only while nothing of the reply has come.
ERRORS = {
    # The pause that it asks for is too long for a retry, and holds for the second request too.
    "busy": (429, "upstream_busy", False, 1),
    "broken": (502, "upstream_failed", False, 4),
    "overloaded": (503, "upstream_unavailable", False, 4),
    "unauthorized": (502, "upstream_failed", False, 2),
    "half": (503, "upstream_unavailable", True, 2),
    "stalled": (504, "upstream_timed_out", True, 2),
    "garbled": (502, "upstream_failed", True, 2),
    "failing": (None, None, True, 2),
}


def cases():
    """Vendor, fault and package."""
    return [(vendor, fault, client) for vendor in VENDORS for fault in FAULTS[1:] for client in ("openai", "anthropic")]


def name(vendor, fault, client):
    """The upstream of a case: what others fail at is not counted against it."""
    return f"{vendor}-{fault}-{client}"


class Leaks:
    """Looks for parts of keys in texts."""

    def __init__(self, keys):
        self.parts = [key[at : at + PART] for key in keys for at in range(len(key) - PART + 1)]
        self.read = {}

    def check(self, where, text):
        self.read[where] = self.read.get(where, 0) + len(text)
        for part in self.parts:
            at = text.find(part)
            assert at < 0, f"{where} has a part of a key: {text[max(0, at - 200) : at + 40]!r}"

    def describe(self):
        return ", ".join(f"{where} ({size} characters)" for where, size in self.read.items() if size)


def get(url, key):
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace")


def pages(url, key):
    """All that the console shows to an operator, with the trace of the newest request."""
    found = {page: get(url + page, key) for page in PAGES}
    newest = json.loads(found["/v1/requests"])["requests"][0]
    yield from found.items()
    yield "trace", get(f"{url}/v1/requests/{newest['id']}/trace", key)


def with_openai(front, model, messages, stream, **more):
    """Text of the reply, and its error."""
    asked = dict(model=model, messages=messages, temperature=0, reasoning_effort="none", stream=stream, **more)
    said = ""
    try:
        reply = front.openai.chat.completions.create(**asked)
        if not stream:
            return reply.choices[0].message.content, None
        for chunk in reply:
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
        return said, None
    except openai.APIError as error:
        return said, error


def with_anthropic(front, model, messages, stream, **more):
    """Text of the reply, and its error."""
    asked = dict(model=model, messages=messages, max_tokens=500, thinking=SILENT, **more)
    said = ""
    try:
        if not stream:
            return text(front.anthropic.messages.create(**asked)), None
        with front.anthropic.messages.stream(**asked) as events:
            for piece in events.text_stream:
                said += piece
        return said, None
    except anthropic.APIError as error:
        return said, error


def everything(error):
    """All that a client gets of an error."""
    response = getattr(error, "response", None)
    return f"{error} {error.body} {dict(response.headers) if response is not None else ''}"


def check(front, script, vendor, fault, client):
    """Asks, and checks what the client and the upstream see. Returns all that was said."""
    ask = with_openai if client == "openai" else with_anthropic
    place = (vendor, f"{fault}.{client}")
    model = f"{name(vendor, fault, client)}/big@plain"
    if fault == "endless":
        return left_by_the_client(front, script, model, client, place)
    if fault == "wrong-call":
        return wrong_call(front, model, client)
    whole, whole_error = ask(front, model, QUESTION, False)
    streamed, stream_error = ask(front, model, QUESTION, True)
    asked = len(script.seen(*place))
    errors = [everything(error) for error in (whole_error, stream_error) if error]
    said = " ".join([whole or "", streamed, *errors])
    if fault not in ERRORS:
        assert (whole, whole_error, streamed, stream_error) == (ANSWER, None, ANSWER, None), said
        assert asked == (2 if fault == "slow" else 3), (asked, said)
        return said
    status, code, has_begun, times = ERRORS[fault]
    assert whole_error is not None and stream_error is not None, said
    assert asked == times, (asked, said)
    if fault == "failing":
        # Claude says that it is overloaded; the others that they failed.
        status, code = (503, "upstream_unavailable") if vendor == "claude" else (502, "upstream_failed")
    assert whole_error.status_code == status, (whole_error.status_code, said)
    if client == "openai":
        assert whole_error.code == code, (whole_error.code, said)
    assert "upstream" in str(whole_error.body), said
    assert bool(streamed) == has_begun and ANSWER.startswith(streamed.strip()), said
    if not has_begun:
        assert stream_error.status_code == status, said
    if fault == "busy":
        seconds = int(whole_error.response.headers["retry-after"])
        assert 1 <= seconds <= 100, seconds
    return said


def left_by_the_client(front, script, model, client, place):
    """A client that disconnects closes the connection to the upstream."""
    if client == "openai":
        stream = front.openai.chat.completions.create(model=model, messages=QUESTION, stream=True)
        next(iter(stream))
        stream.close()
    else:
        with front.anthropic.messages.stream(model=model, messages=QUESTION, max_tokens=500) as stream:
            next(iter(stream.text_stream))
    for _ in range(400):
        if script.was_left(*place):
            return ""
        time.sleep(0.1)
    raise AssertionError("the upstream still streams")


def wrong_call(front, model, client):
    """Arguments that are no JSON are no call of the client's."""
    if client == "openai":
        reply = front.openai.chat.completions.create(
            model=model, messages=WEATHER, tools=[OPENAI_TOOL], reasoning_effort="none")
        assert not reply.choices[0].message.tool_calls and reply.choices[0].finish_reason != "tool_calls", reply
    else:
        tool = {"name": "get_weather", "input_schema": OPENAI_TOOL["function"]["parameters"]}
        reply = front.anthropic.messages.create(model=model, messages=WEATHER, max_tokens=500, tools=[tool])
        assert all(block.type != "tool_use" for block in reply.content), reply
    said = reply.model_dump_json()
    assert "dropped a call of `get_weather`" in said, said
    return said
