"""The checks of a client package: collects them, and runs them against a server."""

import traceback

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


def run(package, client, url):
    """Runs all checks and prints the result of each. Returns the exit code."""
    model = next(iter(client.models.list())).id
    print(f"{package.__name__} {package.__version__}, model {model} at {url}")
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
