"""The checks of a client package: collects them, and runs them against a server."""

import traceback
from importlib.metadata import version

CHECKS = []

# Rounds of the longest loops of tools.
ROUNDS = 20
# A schema whose value the bundled model need not know: the form of a strict tool leaves it a choice of two.
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def check(function):
    """Adds a check: a function of the package's client and the name of the model."""
    CHECKS.append(function)
    return function


def streamed_calls(stream):
    """Reads a stream of chats. Returns name and arguments of each call by its index, and the reason of the end."""
    calls, reason = {}, None
    for chunk in stream:
        reason = chunk.choices[0].finish_reason or reason
        for call in chunk.choices[0].delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    return calls, reason


def run(package, client, url, model=None):
    """Runs all checks with `model`, or else the first that is listed, and prints the result of each. Returns the exit code."""
    model = model or next(iter(client.models.list())).id
    print(f"{package.__name__} {version(package.__name__)}, model {model} at {url}")
    failures = 0
    for function in CHECKS:
        try:
            function(client, model)
            verdict = "ok"
        except Exception:
            failures += 1
            verdict = "FAILED\n" + traceback.format_exc()
        print(f"  {function.__name__.replace('_', ' ')}: {verdict}", flush=True)
    print(f"{len(CHECKS) - failures} of {len(CHECKS)} checks passed")
    return 1 if failures else 0
