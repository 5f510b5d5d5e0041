"""Problems with a known answer: what a problem holds, which ones are held out, and how an answer is graded.

A kind of problem is a function `kind(random, level) -> Problem` of `kinds_numbers.py` or `kinds_texts.py`. All choices
come from the `random.Random` that it is given, so a seed gives equal problems on every machine.

The split is by content: `content` is what the problem is about, without the words around it, and its hash alone says
whether it is held out. A held-out problem is therefore never trained on in another wording, another form of answer or
another order.
"""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field

# One problem of this many is held out.
HELD_OUT = 20
# Seconds that a written function may take for all its cases.
CODE_SECONDS = 5


@dataclass
class Slip:
    """A wrong first pass as a model makes it: the lines, the wrong answer, what was wrong, and how likely it is here.

    The likelihood depends on what the prompt shows (a leap year, a list with a repeated number), so that a model can be
    sure of some first answers and unsure of others.
    """

    lines: list
    answer: object
    reason: str
    likelihood: float


@dataclass
class Problem:
    kind: str
    level: int
    content: tuple
    question: str
    answer: object
    # Lines of a right first pass; the last one states the result.
    work: list
    # Other ways to the same answer, each a list of lines.
    checks: list
    slip: Slip = None
    # Names among which the last one named is the answer.
    candidates: list = field(default_factory=list)
    # Arguments and results of a function; then `answer` is its source.
    cases: list = field(default_factory=list)
    # What the answer is called in a sentence: "The answer", "The oldest person".
    subject: str = "The answer"
    # How reasoning names the answer, where that is not the answer itself.
    short: str = ""

    @property
    def is_held_out(self):
        return digest(self.kind, self.content) % HELD_OUT == 0


def digest(kind, content):
    """A number from the contents, equal on every machine and in every version of Python."""
    text = json.dumps([kind, content], sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


# Forms of an answer: what the prompt asks for, and the share of problems that ask for it.
FORMS = {"sentence": 0.5, "bare": 0.25, "json": 0.25}
ASK = {
    "sentence": ["", "", "", "Answer in one sentence."],
    "bare": ["Answer with the result only.", "Give only the result.", "Reply with nothing but the result."],
    "json": ['Answer in JSON with the key "answer".', 'Give the result as JSON with the key "answer".'],
}


def asked(problem, form, random):
    """The text of the prompt that asks for a form."""
    ask = "" if problem.cases else random.choice(ASK[form])
    return f"{problem.question}\n{ask}" if ask else problem.question


def plain(answer):
    """An answer as a person writes it."""
    return ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)


def written(problem, form):
    """The right answer in a form."""
    if problem.cases:
        return f"```python\n{problem.answer}\n```"
    if form == "json":
        return "```json\n" + json.dumps({"answer": problem.answer}) + "\n```"
    return plain(problem.answer) if form == "bare" else f"{problem.subject} is {plain(problem.answer)}."


def rule(problem, form):
    """The grader of `steersman eval` for the answer, and its arguments: `server/bench/src/eval/grade.rs` has the same
    names."""
    if problem.cases:
        return {"rule": "code", "cases": [{"arguments": a, "expected": r} for a, r in problem.cases]}
    if form == "json":
        return {"rule": "json", "expected": {"answer": problem.answer}}
    if form == "bare":
        return {"rule": "exactly", "expected": plain(problem.answer), "is_loose": True}
    if problem.candidates:
        return {"rule": "last_of", "candidates": problem.candidates, "expected": problem.answer}
    if isinstance(problem.answer, int):
        return {"rule": "last_number", "expected": problem.answer}
    return {"rule": "phrase", "expected": plain(problem.answer)}


def normal(text):
    """Lower case words without punctuation, with single spaces."""
    return " ".join(re.findall(r"\w+", text.lower().replace("_", " ")))


def block(answer):
    """The contents of the first fenced block of an answer, or the whole answer."""
    if "```" not in answer:
        return answer.strip()
    rest = answer.split("```", 1)[1]
    return rest.partition("\n")[2].split("```")[0].strip() if "\n" in rest else rest.split("```")[0].strip()


def numbers(text):
    """The numbers of a text; a sign counts unless a word stands before it."""
    found = re.findall(r"(?<![A-Za-z0-9_])-?\d+(?:\.\d+)?|\d+(?:\.\d+)?", text)
    return [float(number) for number in found]


def leaves(value):
    """JSON with numbers as texts, as the grader of `steersman eval` compares it."""
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, list):
        return [leaves(item) for item in value]
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def is_right(answer, rule):
    """Whether an answer passes its grader. It follows `grade.rs`, which decides in `steersman eval`."""
    name, expected = rule["rule"], rule.get("expected")
    if name == "last_number":
        found = numbers(answer)
        return bool(found) and found[-1] == expected
    if name == "exactly":
        return normal(answer) == normal(expected) if rule["is_loose"] else answer.strip() == expected
    if name == "phrase":
        return f" {normal(expected)} " in f" {normal(answer)} "
    if name == "last_of":
        known = [candidate.lower() for candidate in rule["candidates"]]
        named = [word for word in normal(answer).split() if word in known]
        return bool(named) and named[-1] == expected.lower()
    if name == "json":
        text = block(answer)
        begin = min((at for at in (text.find("["), text.find("{")) if at >= 0), default=0)
        try:
            return leaves(json.loads(text[begin : max(text.rfind("]"), text.rfind("}")) + 1])) == leaves(expected)
        except ValueError:
            return False
    assert name == "code", f"{name} is not a grader"
    return passes(block(answer), rule["cases"])


# The words that a generated function may consist of; whatever else a model writes is not run.
CODE = re.compile(r"[\w\s()\[\]:,.+\-*/%=<>!'\"]*")
FORBIDDEN = re.compile(r"__|\b(import|open|exec|eval|compile|globals|locals|getattr|setattr|input|breakpoint|while)\b")
RUNNER = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2)); resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
task = json.load(sys.stdin); space = {}
exec(task["code"], space)
last = [value for value in space.values() if callable(value) and getattr(value, "__module__", 1) is None or
        type(value).__name__ == "function"][-1]
print(all(last(*case["arguments"]) == case["expected"] for case in task["cases"]))
"""


def passes(code, cases):
    """Whether the last function of a source returns what each case expects, in a process of its own with limits."""
    if "def " not in code or not CODE.fullmatch(code) or FORBIDDEN.search(code):
        return False
    task = json.dumps({"code": code, "cases": cases})
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-S", "-c", RUNNER], input=task, capture_output=True, text=True, timeout=CODE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return run.stdout.strip() == "True"
