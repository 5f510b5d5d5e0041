"""A scripted upstream that speaks as vLLM, Claude, Gemini's and Grok's endpoints for OpenAI's clients do, with faults.

The path of a request says which, and what goes wrong: `/VENDOR/FAULT/v1/chat/completions`, `/claude/FAULT/v1/messages`.
After the fault may stand a point and whatever tells requests apart.
Replies follow from the request: a capital, calls of `get_weather` for the cities that are asked for, what the tool
said, a JSON value. Each vendor refuses what its published reference does not have.
"""

import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER, REASONING = "The capital of Italy is Rome.", "The user asks for a capital. Italy has one."
VALUE = '{"city": "Rome"}'
SIGNATURE = "c2lnbmF0dXJlIG9mIHRoZSByZWFzb25pbmc="
PROMPT_TOKENS, CACHED_TOKENS = 30, 10
#: Events of a reply before what goes wrong in its middle.
BEFORE = 4
#: What goes wrong. Those that end in `-once` go wrong for the first request only.
FAULTS = [
    "none", "busy", "busy-once", "broken", "broken-once", "overloaded", "unauthorized", "half", "slow", "stalled", "garbled",
    "garbled-once", "failing", "failing-once", "endless", "wrong-call",
]
STATUS = {"busy": 429, "broken": 500, "overloaded": 503, "unauthorized": 401}


@dataclass
class Wish:
    """What a request asks for, in whichever protocol."""

    question: str
    reasons: bool
    limit: int
    tools: bool = False
    form: bool = False
    results: list = field(default_factory=list)


def plan(wish, fault):
    """The parts of the reply: kind and text, or the id and the arguments of a call."""
    parts = [("reasoning", REASONING)] if wish.reasons else []
    if wish.results:
        return [*parts, ("text", f"The weather is {wish.results[-1]}.")]
    cities = re.findall("Rome|Paris", wish.question) if wish.tools and "weather" in wish.question else []
    if not cities:
        return [*parts, ("text", VALUE if wish.form else ANSWER)]
    broken = fault == "wrong-call"
    value = lambda city: city if broken else f'"{city}"'
    return parts + [("call", f"call_{city.lower()}", '{"city": %s}' % value(city)) for city in cities]


def pieces(text):
    """A text in pieces of a word."""
    return re.findall(r"\s*\S+", text)


def halves(text):
    return text[: len(text) // 2], text[len(text) // 2 :]


def limited(parts, limit):
    """The parts within a limit of words, their number, and whether it was reached."""
    left, kept = limit, []
    for kind, *rest in parts:
        words = pieces(rest[-1])
        if len(words) > left:
            return [*kept, (kind, *rest[:-1], "".join(words[:left]))], limit, True
        left -= len(words)
        kept.append((kind, *rest))
    return kept, limit - left, False


def words_of(parts, kind):
    return sum(len(pieces(part[-1])) for part in parts if part[0] == kind)


class OpenAi:
    """What the endpoints for OpenAI's clients have in common."""

    fields = {
        "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n",
        "stop", "seed", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort",
        "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs",
    }
    header, owner, line = "authorization", "", "\n"

    def key(self, key):
        return f"Bearer {key}"

    def models(self, name):
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 1, "owned_by": self.owner}]}

    def reasons(self, body):
        return body.get("reasoning_effort", "none") != "none"

    def wish(self, body):
        messages = body["messages"]
        results = [message["content"] for message in messages[-2:] if message["role"] == "tool"]
        question = [message["content"] for message in messages if message["role"] == "user"][-1]
        return Wish(
            question=question, reasons=self.reasons(body), results=results,
            limit=body.get("max_completion_tokens", body.get("max_tokens", 1000)),
            tools=bool(body.get("tools")) and body.get("tool_choice") != "none",
            form=body.get("response_format", {}).get("type") == "json_schema",
        )

    def refusal(self, body, headers):
        """Why the request is refused, or None."""
        return None

    def error(self, status, message):
        return {"error": {"message": message, "type": "error", "param": None, "code": status}}

    def failure(self, message):
        return f"data: {json.dumps(self.error(500, message))}{self.line * 2}"

    def chunk(self, body, delta, reason=None, usage=None, **more):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        choices = [choice] if delta is not None else []
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"], "choices": choices}
        return f"data: {json.dumps(chunk | ({'usage': usage} if usage else {}))}{self.line * 2}"

    def usage(self, parts, tokens):
        reasoning = words_of(parts, "reasoning")
        return {
            "prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS}, "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def reasoning(self, text):
        return [{"reasoning_content": piece} for piece in pieces(text)]

    def call(self, number, name, arguments):
        """The deltas of a call; whole, unless the vendor sends it in pieces."""
        function = {"name": "get_weather", "arguments": arguments}
        return [{"tool_calls": [{"index": number, "id": name, "type": "function", "function": function}]}]

    def deltas(self, parts):
        calls = 0
        for kind, *rest in parts:
            if kind == "reasoning":
                yield from self.reasoning(*rest)
            elif kind == "text":
                yield from ({"content": piece} for piece in pieces(*rest))
            else:
                yield from self.call(calls, *rest)
                calls += 1

    def reason(self, parts, is_cut):
        return "length" if is_cut else "tool_calls" if parts[-1][0] == "call" else "stop"

    def events(self, body, parts, tokens, is_cut):
        yield self.chunk(body, {"role": "assistant", "content": ""})
        yield from (self.chunk(body, delta) for delta in self.deltas(parts))
        yield self.chunk(body, {}, self.reason(parts, is_cut))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield self.chunk(body, None, usage=self.usage(parts, tokens))
        yield f"data: [DONE]{self.line * 2}"


class Vllm(OpenAi):
    """vLLM: reasoning in `reasoning`, calls in pieces, counts in every chunk; ignores fields that it does not know."""

    owner = "vllm"

    def models(self, name):
        models = super().models(name)
        models["data"][0] |= {"max_model_len": 8192, "root": name, "parent": None}
        return models

    def reasons(self, body):
        return body.get("chat_template_kwargs", {}).get("enable_thinking", False)

    def refusal(self, body, headers):
        if body.get("add_generation_prompt", True) and body.get("continue_final_message"):
            return "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        return None

    def reasoning(self, text):
        return [{"reasoning": piece} for piece in pieces(text)]

    def call(self, number, name, arguments):
        first, second = halves(arguments)
        function = {"name": "get_weather", "arguments": ""}
        yield {"tool_calls": [{"index": number, "id": name, "type": "function", "function": function}]}
        yield from ({"tool_calls": [{"index": number, "function": {"arguments": half}}]} for half in (first, second))

    def chunk(self, body, delta, reason=None, usage=None, **more):
        if (body.get("stream_options") or {}).get("continuous_usage_stats"):
            usage = usage or {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1, "total_tokens": PROMPT_TOKENS + 1}
        return super().chunk(body, delta, reason, usage, **({"stop_reason": None} if reason else {}))


class Gemini(OpenAi):
    """Gemini: refuses unknown names, hides its reasoning and counts it apart, sends whole calls that all have the number 0,
    and wants their signatures back. Errors come as a list. Models are in a folder."""

    owner, line = "google", "\r\n"

    def models(self, name):
        return super().models(f"models/{name}")

    def refusal(self, body, headers):
        if unknown := sorted(body.keys() - self.fields):
            return f'Invalid JSON payload received. Unknown name "{unknown[0]}": Cannot find field.'
        for message in body["messages"]:
            calls = message.get("tool_calls") or []
            if calls and (calls[0].get("extra_content") or {}).get("google") != {"thought_signature": SIGNATURE}:
                return "Function call is missing a thought_signature in functionCall parts."
        return None

    def error(self, status, message):
        names = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
        return [{"error": {"code": status, "message": message, "status": names.get(status, "INTERNAL")}}]

    def reasoning(self, text):
        return []

    def call(self, number, name, arguments):
        [delta] = super().call(0, name, arguments)
        if number == 0:
            delta["tool_calls"][0]["extra_content"] = {"google": {"thought_signature": SIGNATURE}}
        return [{"role": "assistant"} | delta]

    def usage(self, parts, tokens):
        usage = super().usage(parts, tokens)
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return usage | {"completion_tokens": tokens - reasoning}


class Grok(OpenAi):
    """Grok: whole calls, reasoning counted beside the answer, errors as texts; refuses penalties and stop strings, as its
    reasoning models do."""

    owner = "xai"

    def refusal(self, body, headers):
        for name in ("presence_penalty", "frequency_penalty", "stop"):
            if name in body:
                return f"Model {body['model']} does not support parameter {name}."
        return None

    def error(self, status, message):
        return {"code": f"The request failed with {status}", "error": message}

    def usage(self, parts, tokens):
        usage = super().usage(parts, tokens)
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return usage | {"completion_tokens": tokens - reasoning, "num_sources_used": 0}


class Claude:
    """Claude's messages: refuses unknown fields, and wants the reasoning before a call back as it was."""

    header, line = "x-api-key", "\n"
    fields = {
        "model", "messages", "max_tokens", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences", "tools",
        "tool_choice", "thinking", "output_config", "metadata", "service_tier",
    }
    kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}

    def key(self, key):
        return key

    def models(self, name):
        return {"data": [{"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z"}], "has_more": False}

    def wish(self, body):
        users = [message["content"] for message in body["messages"] if message["role"] == "user"]
        results = [block["content"] for block in users[-1] if block["type"] == "tool_result"]
        question = " ".join(block["text"] for content in users for block in content if block["type"] == "text")
        return Wish(
            question=question, reasons="thinking" in body, limit=body["max_tokens"], results=results,
            form="format" in body.get("output_config", {}),
            tools=bool(body.get("tools")) and body.get("tool_choice", {}).get("type") != "none",
        )

    def refusal(self, body, headers):
        if unknown := sorted(body.keys() - self.fields):
            return f"{unknown[0]}: Extra inputs are not permitted"
        if headers.get("anthropic-version") != "2023-06-01":
            return "anthropic-version: header is required"
        if body["messages"][-1]["role"] != "user":
            return "This model does not support assistant message prefill. The conversation must end with a user message."
        thinking = body.get("thinking")
        if not thinking:
            return None
        if not 1024 <= thinking["budget_tokens"] < body["max_tokens"]:
            return "`max_tokens` must be greater than `thinking.budget_tokens`."
        if body.get("temperature", 1) != 1 or "top_k" in body:
            return "`temperature` may only be set to 1 when thinking is enabled."
        if body.get("tool_choice", {}).get("type") in ("any", "tool"):
            return "Thinking may not be enabled when tool_choice forces tool use."
        thought = {"type": "thinking", "thinking": REASONING, "signature": SIGNATURE}
        for message in body["messages"]:
            calls = any(block["type"] == "tool_use" for block in message["content"])
            if message["role"] == "assistant" and calls and message["content"][0] != thought:
                return "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found another."
        return None

    def error(self, status, message):
        return {"type": "error", "error": {"type": self.kinds[status], "message": message}, "request_id": "req_1"}

    def event(self, kind, **more):
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n"

    def failure(self, message):
        return self.event("error", error={"type": "overloaded_error", "message": message})

    def block(self, index, start, deltas):
        yield self.event("content_block_start", index=index, content_block=start)
        yield from (self.event("content_block_delta", index=index, delta=delta) for delta in deltas)
        yield self.event("content_block_stop", index=index)

    def events(self, body, parts, tokens, is_cut):
        usage = {"input_tokens": PROMPT_TOKENS - CACHED_TOKENS, "cache_read_input_tokens": CACHED_TOKENS, "cache_creation_input_tokens": 0}
        message = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": [], "stop_reason": None,
            "stop_sequence": None, "usage": usage | {"output_tokens": 1},
        }
        yield self.event("message_start", message=message)
        yield self.event("ping")
        for index, (kind, *rest) in enumerate(parts):
            if kind == "reasoning":
                thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(*rest)]
                signature = {"type": "signature_delta", "signature": SIGNATURE}
                yield from self.block(index, {"type": "thinking", "thinking": "", "signature": ""}, [*thoughts, signature])
            elif kind == "text":
                texts = [{"type": "text_delta", "text": piece} for piece in pieces(*rest)]
                yield from self.block(index, {"type": "text", "text": ""}, texts)
            else:
                name, arguments = rest
                start = {"type": "tool_use", "id": name, "name": "get_weather", "input": {}}
                parts_of = [{"type": "input_json_delta", "partial_json": part} for part in ("", *halves(arguments))]
                yield from self.block(index, start, parts_of)
        reason = "max_tokens" if is_cut else "tool_use" if parts[-1][0] == "call" else "end_turn"
        yield self.event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage={"output_tokens": tokens})
        yield self.event("message_stop")


VENDORS = {"vllm": Vllm(), "claude": Claude(), "gemini": Gemini(), "grok": Grok()}


class Script(ThreadingHTTPServer):
    """Serves all vendors, each with its key."""

    daemon_threads = True

    #: A server with all upstreams asks each for its models at once, and connections beyond this are refused.
    request_queue_size = 256

    def __init__(self, keys):
        super().__init__(("127.0.0.1", 0), Handler)
        self.keys, self.lock = keys, threading.Lock()
        self.bodies, self.left = {}, {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, vendor, fault="none"):
        version = "" if vendor == "claude" else "/v1"
        return f"http://127.0.0.1:{self.server_port}/{vendor}/{fault}{version}"

    def seen(self, vendor, fault="none"):
        """The bodies of the requests so far."""
        with self.lock:
            return list(self.bodies.get((vendor, fault), []))

    def was_left(self, vendor, fault):
        """How many replies the client has not read to their end."""
        with self.lock:
            return self.left.get((vendor, fault), 0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except OSError:
            pass

    def place(self):
        """Vendor, fault and route."""
        _, vendor, fault, *route = self.path.partition("?")[0].split("/")
        return vendor, fault, "/".join(route)

    def say(self, status, json_body, headers=()):
        text = json.dumps(json_body).encode()
        self.send_response(status)
        for name, value in [("content-type", "application/json"), ("content-length", str(len(text))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def has_key(self, vendor):
        expected = VENDORS[vendor].key(self.server.keys[vendor])
        return self.headers.get(VENDORS[vendor].header) == expected

    def do_GET(self):
        vendor, _, route = self.place()
        assert route == "v1/models" and self.has_key(vendor), self.path
        self.say(200, VENDORS[vendor].models("big"))

    def do_POST(self):
        vendor, place, route = self.place()
        fault = place.partition(".")[0]
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        dialect, key = VENDORS[vendor], self.server.keys[vendor]
        assert route == ("v1/messages" if vendor == "claude" else "v1/chat/completions"), self.path
        with self.server.lock:
            requests = self.server.bodies.setdefault((vendor, place), [])
            requests.append(body)
            is_first = len(requests) == 1
        is_once = fault.endswith("-once")
        name = fault.removesuffix("-once") if is_first or not is_once else "none"
        if not self.has_key(vendor):
            return self.say(401, dialect.error(401, "Incorrect API key provided."))
        if name in STATUS:
            # Vendors quote the key, or parts of it.
            message = f"Sorry, {name}. Key {key}, or {key[:8]}****{key[-6:]}."
            pause = [("retry-after", "1" if is_once else "100")] if name == "busy" else []
            return self.say(STATUS[name], dialect.error(STATUS[name], message), pause)
        if why := dialect.refusal(body, self.headers):
            return self.say(400, dialect.error(400, why))
        wish = dialect.wish(body)
        parts, tokens, is_cut = limited(plan(wish, fault), wish.limit)
        events = list(dialect.events(body, parts, tokens, is_cut))
        self.stream((vendor, place), self.disturbed(name, dialect, events, key, 0 if is_once else BEFORE))

    def disturbed(self, fault, dialect, events, key, before):
        """The events with what goes wrong: texts, seconds of a pause, or None for the end of the connection."""
        if fault == "garbled":
            return [*events[:before], 'data: {"choices": [' + dialect.line * 2, *events[before:]]
        if fault == "failing":
            return [*events[:before], dialect.failure(f"Out of memory. Your key is {key}."), *events[-1:]]
        if fault == "half":
            return [*events[:before], 0.2, None]
        if fault == "stalled":
            return [*events[:before], 60, None]
        if fault == "slow":
            return [part for event in events for part in (event, 0.1)]
        if fault == "endless":
            return [*events[:before], *[part for _ in range(600) for part in (events[before - 1], 0.1)], None]
        return events

    def stream(self, place, parts):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for part in parts:
                if part is None:
                    self.close_connection = True
                    return
                if isinstance(part, str):
                    data = part.encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                elif self.is_closed(part):
                    raise ConnectionResetError
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            with self.server.lock:
                self.server.left[place] = self.server.left.get(place, 0) + 1
            self.close_connection = True

    def is_closed(self, seconds):
        """Waits so long, and returns true if the client closes the connection meanwhile."""
        self.connection.settimeout(seconds)
        try:
            return self.connection.recv(1) == b""
        except TimeoutError:
            return False
        finally:
            self.connection.settimeout(None)
