"""What an operator sees of a real server: its log as text and as JSON, its metrics, the dashboard and the alert rules.

    python tests/monitoring.py target/debug/steersman

With `promtool` on PATH, that program checks the rules, the expressions of the dashboard and the names of the metrics,
too, and that each alert fires when it should, and only then.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECRET = "sesame-47"
#: Text of Rust's `Debug`, and of its types, that no line for an operator has.
DEBUG = re.compile(r"Some\(|\bNone\b|\w+ \{ |\w+\(\"|Err\(|Ok\(|\d(?:ns|µs)\b|::<")
#: A looping prompt: the policy closes the reasoning.
LOOP = "Optimize this SQL query: SELECT * FROM items WHERE price = 26;"
#: Series that this server has none of: no policy has the grant `counters`, and it has no upstreams.
ABSENT = {"steersman_policy_counts"} | {
    f"steersman_upstream_{name}" for name in ("breaker", "failures", "requests", "requests_now", "tokens", "tokens_today")
}


def quantile(name, counts):
    """A histogram to which each minute adds `counts`, by their upper bounds."""
    buckets = {**counts, "+Inf": max(counts.values())}
    return {f'{name}_bucket{{model="m",le="{bound}"}}': f"0+{count}x60" for bound, count in buckets.items()}


UP, STARTED = 'up{job="steersman"}', 'process_start_time_seconds{job="steersman"}'
OPEN, MOST = 'process_open_fds{job="steersman"}', 'process_max_fds{job="steersman"}'
#: For each alert: the minute in which it is looked at, series with which it fires then, and series with which it does not.
ALERTS = {
    "SteersmanDown": (4, {UP: "0x30"}, {UP: "1x30", 'up{job="other"}': "0x30"}),
    "SteersmanRestarts": (10, {STARTED: "1 2 3 4x30"}, {STARTED: "1 2 3x30"}),
    "SteersmanReloadFailed": (
        1, {"steersman_config_last_reload_successful": "0x30"}, {"steersman_config_last_reload_successful": "1x30"}
    ),
    "SteersmanErrors": (
        12,
        {'steersman_requests_total{status="2xx"}': "0+9x30", 'steersman_requests_total{status="5xx"}': "0+1x30"},
        {'steersman_requests_total{status="4xx"}': "0+99x30", 'steersman_requests_total{status="5xx"}': "0+1x30"},
    ),
    "SteersmanSlowFirstToken": (
        25,
        quantile("steersman_time_to_first_token_seconds", {"30": 9, "60": 10}),
        quantile("steersman_time_to_first_token_seconds", {"30": 99, "60": 100}),
    ),
    "SteersmanSlowTokens": (
        25,
        quantile("steersman_token_gap_seconds", {"0.5": 9, "1.0": 10}),
        quantile("steersman_token_gap_seconds", {"0.5": 99, "1.0": 100}),
    ),
    # A queue that was empty for a moment is no reason for an alert.
    "SteersmanQueue": (
        11, {'steersman_queue_length{model="m"}': "1x30"}, {'steersman_queue_length{model="m"}': "1x5 0 1x30"}
    ),
    "SteersmanPreemptions": (
        15,
        {'steersman_preemptions_total{model="m"}': "0+3x30"},
        {'steersman_preemptions_total{model="m"}': "0+1x30"},
    ),
    "SteersmanConnectionsRefused": (
        5,
        {'steersman_closed_connections_total{reason="refused"}': "0 0 1x30"},
        {'steersman_closed_connections_total{reason="timed_out"}': "0+9x30"},
    ),
    "SteersmanOpenFiles": (7, {OPEN: "91x30", MOST: "100x30"}, {OPEN: "90x30", MOST: "100x30"}),
    # A store that was not opened has no series of its own.
    "SteersmanStateNotSaved": (
        10,
        {"steersman_cache_disk_saving": "0x30", "steersman_cache_disk_enabled": "1x30"},
        {"steersman_cache_disk_saving": "0x30", "steersman_cache_disk_enabled": "0x30"},
    ),
    "SteersmanPolicyInactive": (
        4, {'steersman_policy_active{policy="p"}': "0x30"}, {'steersman_policy_active{policy="p"}': "0 1x30"}
    ),
    "SteersmanPolicyPaused": (
        1,
        {'steersman_policy_breaker{policy="p",state="open"}': "1x30"},
        {
            'steersman_policy_breaker{policy="p",state="open"}': "0x30",
            'steersman_policy_breaker{policy="p",state="closed"}': "1x30",
        },
    ),
    "SteersmanPolicyFailures": (
        10,
        {'steersman_policy_failures_total{policy="p"}': "0+1x30"},
        {'steersman_policy_failures_total{policy="p"}': "0 1 2x30"},
    ),
    "SteersmanPolicyUpdateRejected": (
        1,
        {'steersman_policy_update_rejected{policy="p"}': "1x30"},
        {'steersman_policy_update_rejected{policy="p"}': "0x30"},
    ),
    "SteersmanPolicyParameterProblem": (
        1,
        {'steersman_policy_parameter_problem{profile="p",param="rules"}': "1x30"},
        {'steersman_policy_parameter_problem{profile="p",param="rules"}': "0x30"},
    ),
}


def ask(url, route, body, headers=None, read=True):
    """The status and the body of a reply."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + route, body, {"content-type": "application/json"} | (headers or {}))
    try:
        with urllib.request.urlopen(request) as reply:
            # A client that reads one chunk disconnects.
            return reply.status, reply.read() if read else reply.read(1)
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def use(url):
    """Asks for replies of all kinds, and for what is refused."""
    messages = [{"role": "user", "content": f"What is the capital of Italy? {SECRET}"}]
    chat = {"messages": messages, "max_tokens": 40, "temperature": 0}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    long = {"messages": messages, "max_tokens": 4000, "min_tokens": 4000, "stream": True}
    statuses = [
        ask(url, "/v1/chat/completions", chat, {"x-request-id": "seen-1"})[0],
        ask(url, "/v1/chat/completions", chat | {"stream": True, "n": 2})[0],
        ask(url, "/v1/chat/completions", chat | {"tools": [tool]})[0],
        ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": LOOP}], "temperature": 0})[0],
        ask(url, "/v1/messages", chat | {"max_tokens": 20})[0],
        ask(url, "/v1/responses", {"input": "What is the capital of Spain?", "max_output_tokens": 40})[0],
        ask(url, "/v1/completions", {"prompt": "Rome is", "max_tokens": 8})[0],
        ask(url, "/api/chat", {"model": "tiny-hybrid-4bit", "messages": messages, "options": {"num_predict": 8}})[0],
        ask(url, "/v1/embeddings", {"input": "Rome"})[0],
        ask(url, "/v1/chat/completions", long, read=False)[0],
    ]
    assert statuses[:-2] == [200] * (len(statuses) - 2), statuses
    refused = [
        ask(url, "/v1/chat/completions", b"{")[0],
        ask(url, "/v1/chat/completions", chat | {"temprature": 1})[0],
        ask(url, "/v1/chat/completions", chat | {"model": "made-up-model"})[0],
        ask(url, "/v1/chat/completions", chat, {"host": "made-up-host"})[0],
    ]
    assert all(400 <= status < 500 for status in refused), refused


def wait_for(condition, server, log):
    for _ in range(2400):
        if found := condition():
            return found
        assert server.poll() is None, log.read_text()
        time.sleep(0.25)
    raise AssertionError(log.read_text())


def serve(binary, folder, form, work, *options, filter=None):
    """Runs `work` with the address of a server, and a function that waits for a condition on its log and output.

    Returns the lines of its log, and what `work` returns.
    """
    log, out = Path(folder, f"{form}.log"), Path(folder, f"{form}.out")
    with log.open("w") as errors, out.open("w") as output:
        command = [binary, "serve", "--port", "0", "--data-dir", f"{folder}/data", *options]
        environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
        environment["STEERSMAN_LOG"] = form
        if filter:
            environment["RUST_LOG"] = filter
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    try:
        wait_for(lambda: " at http://" in out.read_text(), server, log)
        url = out.read_text().split(" at ")[1].split("/v1")[0]
        result = work(url, lambda condition: wait_for(lambda: condition(log.read_text(), out.read_text()), server, log))
    finally:
        server.terminate()
        assert server.wait(120) == 0, log.read_text()
    return log.read_text().splitlines(), result


def check_lines(lines):
    """No line has text of `Debug`, or of a prompt."""
    for line in lines:
        # Values that a client sent or a model wrote are no text of `Debug`.
        assert not DEBUG.search(line), line
        assert SECRET not in line, line


def check_text(lines):
    check_lines(lines)
    ready = [line for line in lines if ": ready " in line]
    assert len(ready) == 1, lines
    for field in ["seconds=", "models=tiny-hybrid-4bit", "device=", "memory_limit_bytes=", "threads="]:
        assert field in ready[0], ready
    [seen] = [line for line in lines if "request_id=seen-1" in line]
    assert " request finished status=200 finish=" in seen, seen
    for field in ["id", "request_id", "model", "profile", "route", "prompt_tokens", "completion_tokens", "total_ms"]:
        assert len(re.findall(rf" {field}=", seen)) == 1, (field, seen)
    assert any("notes=" in line and "loop" in line for line in lines), lines


def check_json(lines):
    check_lines(lines)
    lines = [json.loads(line) for line in lines]
    assert all(not isinstance(value, (dict, list)) for line in lines for value in line.values()), lines
    assert [line["message"] for line in lines].count("ready") == 1, lines
    requests = [line for line in lines if line["message"].startswith("request ") and "total_ms" in line]
    [seen] = [line for line in requests if line["request_id"] == "seen-1"]
    expected = {"status": 200, "model": "tiny-hybrid-4bit", "profile": "default", "route": "/v1/chat/completions"}
    assert expected.items() <= seen.items(), seen
    assert seen["prompt_tokens"] > 0 and seen["completion_tokens"] > 0 and seen["tokens_per_s"] > 0, seen
    assert seen["total_ms"] >= seen["first_token_ms"] >= seen["queue_ms"], seen
    failed = {line["code"] for line in requests if line["message"] == "request failed"}
    assert "model_not_found" in failed, failed
    assert len({line["id"] for line in requests}) == len(requests), "a request has one line"


def check_failed_start(binary, folder):
    """A start that fails says why, and nothing of draining."""
    command = [binary, "serve", "--port", "0", "--data-dir", f"{folder}/data", "--model", "/no/such/folder"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert failed.returncode == 1 and "/no/such/folder" in failed.stderr, failed
    assert "draining" not in failed.stderr, failed.stderr


def check_second_start(binary, folder):
    """What the first start measured of the machine is read by the second, which measures nothing."""
    fresh = Path(folder, "fresh")
    fresh.mkdir()
    starts = [serve(binary, fresh, "text", lambda url, wait: None, filter="steersman_engine=debug")[0] for _ in range(2)]
    first, second = ([line for line in lines if " measured" in line] for lines in starts)
    assert any(": prefill measured" in line for line in first), starts[0]
    assert not second, second


def nested(levels):
    """Components in one another, which the server refuses to compile."""
    empty, parts, size = b"\0asm\x0d\0\x01\0", [], 8
    for _ in range(levels):
        number, left = bytearray(), size
        while left >= 0x80:
            number.append(left & 0x7F | 0x80)
            left >>= 7
        # The section of a component, and its size.
        parts.append(empty + b"\x04" + bytes(number) + bytes([left]))
        size += len(parts[-1])
    return b"".join(reversed(parts)) + empty


def check_inactive_policy(binary, folder):
    """A policy that does not compile is named in all places, until its file is replaced."""
    config, policies = Path(folder, "inactive.toml"), Path(folder, "policies")
    policies.mkdir()
    policies.joinpath("mine.wasm").write_bytes(nested(50_000))
    config.write_text(f'[policy]\nfolder = "{policies}"\n[profiles.default]\npolicies = ["mine"]\n')

    def get(url):
        with urllib.request.urlopen(url) as reply:
            return reply.read().decode()

    def work(url, wait):
        begin, end = "The policy mine is not active, and fails in every request: ", "; replace its file, or upload another version\n"
        wait(lambda _, out: begin in out and out.endswith(end))
        inactive = lambda: json.loads(get(f"{url}/health"))["inactive_policies"]
        assert inactive() == [{"policy": "mine", "retries": False}], inactive()
        assert 'steersman_policy_active{policy="mine"} 0\n' in get(f"{url}/metrics")
        fixed = policies / "fixed"
        fixed.write_bytes((ROOT / "policies/passthrough/passthrough.wasm").read_bytes())
        fixed.rename(policies / "mine.wasm")
        wait(lambda log, out: not inactive())
        assert 'steersman_policy_active{policy="mine"} 1\n' in get(f"{url}/metrics")

    serve(binary, folder, "text", work, "--config", str(config))


def family(series):
    return re.sub(r"_(total|bucket|sum|count)$", "", series)


def parse(text):
    """The labels of each series by name."""
    assert text.endswith("# EOF\n"), text[-200:]
    series = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()
        series.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return series


def documented():
    """The families in the tables of HTTP.md."""
    section = (ROOT / "server/HTTP.md").read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    names = set()
    for row in re.findall(r"^\| (`[^|]+) \|", section, re.M):
        for name in re.findall(r"`([^`]+)`", row):
            begin, several, end = re.fullmatch(r"([^{]*)(?:\{(.*)\})?(.*)", name).groups()
            names |= {family(begin + one + end) for one in (several or "").split(",")}
    return names


def expressions():
    """The expressions of alerts and dashboard, without the variables of Grafana."""
    rules = re.findall(r"^ +expr: (.+)$", (ROOT / "configs/alerts.yml").read_text(), re.M)
    dashboard = json.loads((ROOT / "configs/grafana.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(rules) > 10 and len(targets) > 30, (rules, targets)
    plain = [re.sub(r"\$__rate_interval", "5m", target) for target in targets]
    return rules + [re.sub(r"\$(instance|model|profile)", ".*", target) for target in plain]


def check_series(series):
    """Documents, dashboard and alerts name what the server has."""
    families = {family(name) for name in series}
    known = documented()
    assert families <= known, f"not in HTTP.md: {sorted(families - known)}"
    assert known - families == ABSENT, f"not in /metrics: {sorted(known - families)}"
    # What Prometheus adds.
    given = {"instance", "job", "le"}
    for expression in expressions():
        for name, labels in re.findall(r"\b((?:steersman|process)_\w+)(?:\{([^}]*)\})?", expression):
            assert name in series, f"{name} is not in /metrics: {expression}"
            wanted = set(re.findall(r"(\w+)\s*[=!]", labels))
            assert wanted <= series[name] | given, f"{name} has no {wanted - series[name] - given}: {expression}"


def check_alerts(promtool, folder):
    """Each alert fires with the series that it is for, and does not with others: one value a minute."""
    names = re.findall(r"- alert: (\w+)", (ROOT / "configs/alerts.yml").read_text())
    assert names == list(ALERTS), set(names) ^ set(ALERTS)

    def test(name, minutes, values, firing):
        series = [{"series": one, "values": text} for one, text in values.items()]
        # Of alerts that fire, promtool compares labels and texts, too: a count is enough.
        expression = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        samples = [{"labels": "{}", "value": 1}] if firing else []
        expected = {"expr": expression, "eval_time": f"{minutes}m", "exp_samples": samples}
        return {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}

    tests = [
        test(name, minutes, values, firing)
        for name, (minutes, fires, rests) in ALERTS.items()
        for values, firing in [(fires, True), (rests, False)]
    ]
    rules = {"rule_files": [str(ROOT / "configs/alerts.yml")], "tests": tests}
    command = [promtool, "test", "rules", yaml(folder, "alert_test.yml", rules)]
    tested = subprocess.run(command, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def yaml(folder, name, content):
    """A file with `content`: JSON is YAML."""
    file = Path(folder, name)
    file.write_text(json.dumps(content))
    return file


def check_with_promtool(plain, folder):
    """Rules, expressions and names, as Prometheus sees them."""
    promtool = shutil.which("promtool")
    if not promtool:
        assert os.environ.get("CI") != "true", "promtool is not on PATH"
        return print("left out: promtool is not on PATH")
    rules = {"groups": [{"name": "dashboard", "rules": [
        {"record": f"dashboard:n{number}", "expr": expression} for number, expression in enumerate(expressions())
    ]}]}
    file = yaml(folder, "dashboard.yml", rules)
    check_alerts(promtool, folder)
    for checked in [ROOT / "configs/alerts.yml", file]:
        subprocess.run([promtool, "check", "rules", checked], check=True, stdout=subprocess.DEVNULL)
    linted = subprocess.run([promtool, "check", "metrics"], input=plain, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def main():
    binary = Path(sys.argv[1]).resolve()

    def work(url, wait):
        use(url)
        plain = urllib.request.Request(f"{url}/metrics", headers={"accept": "text/plain"})
        with urllib.request.urlopen(f"{url}/metrics") as reply, urllib.request.urlopen(plain) as old:
            metrics = reply.read().decode(), old.read().decode()
        # The client that disconnected has a line, too.
        wait(lambda log, _: "cancelled by the client" in log)
        return metrics

    with tempfile.TemporaryDirectory() as folder:
        # Parameters from files have a series.
        config, rules = Path(folder, "ruled.toml"), Path(folder, "rules.toml")
        rules.write_text('[[rule]]\ndo = { note = "ruled" }\n')
        config.write_text(f'[profiles.ruled]\npolicies = ["rules"]\nparams = {{ rules = {{ file = "{rules}" }} }}\n')
        lines, (text, plain) = serve(binary, folder, "text", work, "--config", str(config))
        check_text(lines)
        series = parse(text)
        check_series(series)
        check_with_promtool(plain, folder)
        lines, _ = serve(binary, folder, "json", work)
        check_json(lines)
        check_failed_start(binary, folder)
        check_inactive_policy(binary, folder)
        check_second_start(binary, folder)
        print(f"{len(series)} series, {len(expressions())} expressions, {len(lines)} lines")


main()
