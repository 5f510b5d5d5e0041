"""Traces of a real server, as a collector gets them: spans of a request, its ids, and no text.

    python tests/traces.py target/debug/steersman
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SECRET = "sesame-47"
#: The trace and the span of the client, which the request's span is below.
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
#: What describes the program and not the request.
NOISE = {"thread.id", "thread.name", "busy_ns", "idle_ns", "target", "level", "code.file.path", "code.module.name"}
received = []


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        received.append((self.path, self.headers["content-type"], body.decode()))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def chat(url):
    messages = [{"role": "user", "content": f"What is the capital of Italy? {SECRET}"}]
    body = json.dumps({"messages": messages, "max_tokens": 40, "temperature": 0}).encode()
    headers = {"content-type": "application/json", "x-request-id": "trace-7", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    # Refused, without a trace of the client: a span of a trace of its own.
    refused = urllib.request.Request(f"{url}/v1/chat/completions", b"{", {"content-type": "application/json"})
    try:
        urllib.request.urlopen(refused)
        raise AssertionError("`{` is no body")
    except urllib.error.HTTPError as error:
        assert error.code == 400, error
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as reply:
        return json.load(reply)


def attributes_of(span):
    """Its attributes as values of Python."""
    return {it["key"]: value_of(it["value"]) for it in span["attributes"]}


def value_of(value):
    [(kind, value)] = value.items()
    if kind == "arrayValue":
        return [value_of(item) for item in value["values"]]
    return int(value) if kind == "intValue" else value


def serve(binary, folder, environment):
    """Serves one request; returns its reply, and what the server wrote."""
    log = Path(folder, "log")
    with log.open("w") as output:
        command = [binary, "serve", "--port", "0", "--data-dir", f"{folder}/data"]
        server = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
    try:
        for _ in range(2400):
            if " at http://" in log.read_text():
                break
            assert server.poll() is None, log.read_text()
            time.sleep(0.25)
        url = log.read_text().split(" at ")[1].split("/v1")[0]
        reply = chat(url)
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
    return reply, log.read_text()


def main():
    binary = Path(sys.argv[1]).resolve()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    with tempfile.TemporaryDirectory() as folder:
        reply, log = serve(binary, folder, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "RUST_LOG": "steersman=debug"})
        spans, attributes = [], {}
        for path, kind, body in received:
            assert (path, kind) == ("/v1/traces", "application/json"), (path, kind)
            assert SECRET not in body and "Rome" not in body, body
            for resource in json.loads(body)["resourceSpans"]:
                attributes |= {it["key"]: it["value"] for it in resource["resource"]["attributes"]}
                spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
        assert attributes["service.name"] == {"stringValue": "steersman"}, attributes
        assert attributes["service.version"]["stringValue"].count(".") == 2, attributes
        requests = [span for span in spans if span["name"] == "POST /v1/chat/completions"]
        # 2 is SERVER.
        assert len(requests) == 2 and all(span["kind"] == 2 for span in requests), requests
        [request] = [span for span in requests if span["traceId"] == TRACE]
        [refused] = [span for span in requests if span["traceId"] != TRACE]
        assert request["parentSpanId"] == PARENT and not refused.get("parentSpanId"), requests
        values = attributes_of(request)
        assert values["request_id"] == "trace-7" and values["id"] == reply["id"], values
        assert values["profile"] == "default", values
        usage = reply["usage"]
        expected = {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "steersman",
            "gen_ai.request.model": reply["model"],
            "gen_ai.response.model": reply["model"],
            "gen_ai.response.id": reply["id"],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.response.finish_reasons": [reply["choices"][0]["finish_reason"]],
        }
        assert expected.items() <= values.items(), (expected, values)
        failed = attributes_of(refused)
        assert failed["http.response.status_code"] == 400 and failed["error.type"], failed
        # A client's mistake is no error of the server.
        assert refused.get("status", {}).get("code", 0) != 2, refused
        for span in spans:
            assert not NOISE & attributes_of(span).keys(), span
        children = [span for span in spans if span.get("parentSpanId") == request["spanId"]]
        names = [span["name"] for span in children]
        assert sorted(set(names)) == ["decode", "hook", "prefill"], names
        assert (names.count("prefill"), names.count("decode")) == (1, 1), names
        prefill = attributes_of(next(span for span in children if span["name"] == "prefill"))
        assert prefill["prompt_tokens"] == usage["prompt_tokens"] and prefill["cached_tokens"] == 0, prefill
        hooks = [it["value"]["stringValue"] for span in children for it in span["attributes"] if it["key"] == "hook"]
        assert hooks == ["on-prompt", "on-request", "on-finish"], hooks
        # Each call of one policy is below that of the chain.
        calls = {span["spanId"] for span in children if span["name"] == "hook"}
        of_policies = [span for span in spans if span["name"] == "policy" and span["traceId"] == request["traceId"]]
        assert [attributes_of(span)["policy"] for span in of_policies] == ["default"] * len(hooks), of_policies
        assert {span["parentSpanId"] for span in of_policies} == calls, of_policies
        assert all(span["traceId"] == request["traceId"] for span in children)
        times = {span["name"]: (int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])) for span in children}
        begin, end = int(request["startTimeUnixNano"]), int(request["endTimeUnixNano"])
        # The engine lets go of a sequence after the reply has been sent, so `decode` may end later than the request.
        assert begin <= times["prefill"][0] < times["decode"][0] < min(times["decode"][1], end), (begin, end, times)
        # The lines of the engine have the id of the HTTP request.
        lines = [line for line in log.splitlines() if reply["id"] in line]
        assert any("steersman_engine" in line for line in lines), log
        assert all("request_id=trace-7" in line for line in lines) and SECRET not in log, lines
        assert all("otel." not in line for line in lines), lines
        print(f"{len(spans)} spans: {', '.join(sorted(names))}")

        # A collector that does not answer costs a warning, and no request.
        collector.shutdown()
        collector.server_close()
        reply, log = serve(binary, folder, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
        assert reply["choices"][0]["message"]["content"], reply
        assert "traces are lost" in log and endpoint in log, log
        # Without the variable nothing is sent.
        sent = len(received)
        serve(binary, folder, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
        assert len(received) == sent


main()
