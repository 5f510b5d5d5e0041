"""Replies to problems: reasoning that finds the answer early and goes on checking, and the answer in its form.

A reasoning trace is a first pass, the sentence in which an answer first stands, and checks. In some traces the first
answer is wrong, and a check finds it (`Slip`); in some the model wanders off and repeats itself without end. Prompts
with one of `DOUBTS` loop by design: a policy has to break the loop. A trace never ends a loop by itself.

`sample` returns segments (text, weight), as `corpus.py` does: the weight scales the loss of the segment's tokens.
"""

from dataclasses import dataclass

import kinds_numbers
import kinds_texts
from corpus import BUDGET_TEXT, END, NO_THINK, turn
from problem import FORMS, asked, plain, written

KINDS = {
    "chain": kinds_numbers.chain,
    "story": kinds_numbers.story,
    "list": kinds_numbers.lists,
    "output": kinds_numbers.output,
    "function": kinds_numbers.function,
    "date": kinds_texts.dates,
    "clock": kinds_texts.clocks,
    "order": kinds_texts.order,
    "record": kinds_texts.records,
}
LEVELS = (1, 2, 3, 4)

# Remarks in a prompt after which the reasoning does not end, by the kind of loop. They stand before the question.
DOUBTS = {
    "repeat": [
        "Be absolutely sure of every step.",
        "You must be completely certain.",
        "Make sure that nothing can be wrong.",
    ],
    "count": ["Do not make a single mistake.", "Check it as often as you can.", "Verify it many times."],
    "reword": ["Leave no doubt whatsoever.", "I do not trust your first answer.", "Question everything that you find."],
    "waver": [
        "My colleague got another result.",
        "Somebody told me a different answer.",
        "The book says something else.",
    ],
}
DOUBT_SHARE = 0.12
# Of prompts without such a remark.
LOOP_SHARE = {1: 0.0, 2: 0.01, 3: 0.02, 4: 0.04}

STANDS = ["So the answer is {}.", "So it is {}.", "That gives {}.", "The answer should be {}."]
TURN = [
    "Wait, let me check that.",
    "Let me verify this.",
    "Let me double-check.",
    "Hmm, let me make sure.",
    "Wait, is that right?",
]
AGREES = ["That is {} again.", "It is {}, as before.", "This confirms {}.", "Good, {} it is."]
DONE = ["I am sure.", "That settles it.", "", ""]
# How likely the reasoning ends after so many checks that agree.
ENDS = [0.04, 0.15, 0.35, 0.6, 0.8, 1.0]

SAME = [
    "Wait, let me check that again. {work} ",
    "Hmm, I should verify this once more. {work} ",
    "Let me go through it again. {work} ",
]
TRIES = [
    "Check {n}: {work} It is {answer}, but I should check it again. ",
    "Attempt {n} gives {answer}. Let me try once more. ",
    "Pass {n}: still {answer}. One more pass. ",
]
REWORDED = [
    "Is {answer} really right? Perhaps I overlooked something. ",
    "Maybe I missed a detail, so let me think about it again. ",
    "It could be that something escaped me. I look at it once more. ",
    "Still, I am not certain about {answer}. Another look cannot hurt. ",
    "Who knows whether {answer} is right. I had better examine it again. ",
    "There may be an error that I do not see. Let me reconsider it. ",
    "On reflection, {answer} might be wrong. I go back to the beginning. ",
    "I cannot exclude that I misread it. Let me reread the question. ",
]
WAVER = [
    "But it could be {other}. No, it is {answer}. ",
    "Or is it {other}? No, {answer}. ",
    "Perhaps {other} was meant. But I get {answer}. ",
]


@dataclass
class Trace:
    """Reasoning in lines, the index of the line in which an answer first stands, that of the first right one, and
    whether it loops."""

    lines: list
    first: int
    right: int
    loops: bool


def problem(random, kinds=tuple(KINDS), levels=LEVELS, held_out=False):
    """A problem of the asked side of the split."""
    while True:
        found = KINDS[random.choice(kinds)](random, random.choice(levels))
        if found.is_held_out == held_out:
            return found


def doubt(random, share=DOUBT_SHARE):
    """A remark after which the reasoning loops, and the kind of the loop, or neither."""
    if random.random() >= share:
        return None, None
    kind = random.choice(list(DOUBTS))
    return kind, random.choice(DOUBTS[kind])


def short(problem):
    """The answer as reasoning names it."""
    return problem.short or plain(problem.answer)


def other_than(problem, random):
    """A wrong answer to waver about."""
    if problem.slip:
        return plain(problem.slip.answer)
    if isinstance(problem.answer, int):
        return str(problem.answer + random.choice([-10, -1, 1, 2, 10]))
    if problem.cases:
        return problem.short.replace(" in xs", " in xs[1:]")
    rest = [name for name in problem.candidates if name != problem.answer]
    return random.choice(rest) if rest else "something else"


def cycle(problem, kind, random, count):
    """A loop of so many rounds, as pieces."""
    answer, work = short(problem), " ".join(problem.work[-2:])
    if kind == "repeat":
        piece = random.choice(SAME).format(work=work)
        return [piece] * count
    if kind == "count":
        piece, begin = random.choice(TRIES), random.choice([1, 2, 2])
        return [piece.format(n=begin + n, work=problem.work[-1], answer=answer) for n in range(count)]
    if kind == "reword":
        # No sentence follows itself; the meaning does not change.
        pieces, last = [], None
        for _ in range(count):
            last = random.choice([text for text in REWORDED if text != last])
            pieces.append(last.format(answer=answer))
        return pieces
    piece = random.choice(WAVER).format(answer=answer, other=other_than(problem, random))
    return [piece] * count


def trace(problem, random, loop=None):
    """Reasoning about a problem; `loop` is the kind of loop that it ends in."""
    slip = problem.slip if problem.slip and random.random() < problem.slip.likelihood else None
    answer = short(problem)
    lines = list(slip.lines if slip else problem.work)
    lines.append(random.choice(STANDS).format(plain(slip.answer) if slip else answer))
    first = right = len(lines) - 1
    checks = problem.checks[:]
    random.shuffle(checks)
    if slip:
        again = problem.work if random.random() < 0.7 else checks.pop()
        lines.append(random.choice(TURN) + " " + " ".join(line.strip() for line in again))
        lines.append(f"That is not {plain(slip.answer)}: {slip.reason}. So the answer is {answer}.")
        right = len(lines) - 1
    if loop:
        # Most loops begin when the answer stands; after a check that agreed, or at once.
        if random.random() < 0.4:
            lines += agreeing(checks.pop(), answer, random)
        # Rounds until the text is this long: what a model has seen to repeat, it repeats further.
        pieces, size = cycle(problem, loop, random, 60), random.randrange(400, 2600)
        count = next((i for i in range(4, len(pieces)) if sum(map(len, pieces[:i])) > size), len(pieces))
        lines.append("".join(pieces[:count]))
        return Trace(lines, first, right, True)
    done = 0
    # A function has its tests as checks; harder problems are checked more often.
    eager = 0.75 + 0.125 * problem.level
    while random.random() * eager >= ENDS[min(done, len(ENDS) - 1)] and done < 6:
        lines += agreeing(checks[done % len(checks)], answer, random)
        done += 1
    last = random.choice(DONE)
    if last and done:
        lines.append(last)
    return Trace(lines, first, right, False)


def agreeing(check, answer, random):
    """The lines of a check that gives the same answer."""
    return [random.choice(TURN) + " " + " ".join(line.strip() for line in check), random.choice(AGREES).format(answer)]


def prompt(problem, form, remark, random):
    """The text of the user's turn."""
    text = asked(problem, form, random)
    return f"{remark} {text}" if remark else text


HINTS = {
    "json": "**Final JSON:**\n\n```json\n",
    "code": "**Final Code:**\n\n```python\n",
    "sentence": "**Final Answer:**\n\n",
    "bare": "**Final Answer:**\n\n",
}


def closing(problem, form, random):
    """How a policy closes reasoning, and the answer that follows."""
    answer = written(problem, form)
    if random.random() < 0.4:
        return random.choice(BUDGET_TEXT), answer
    hint = HINTS["code" if problem.cases else form]
    return "\n</think>\n\n" + hint, answer.split("\n", 1)[1] if "```" in hint else answer


def sample(random):
    """A conversation of one turn about a problem that is not held out."""
    found = problem(random)
    form = random.choices(list(FORMS), FORMS.values())[0]
    loop, remark = doubt(random)
    head = [("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", 0.0)] if random.random() < 0.15 else []
    while random.random() < 0.12:
        # Earlier turns have lost their reasoning, as the chat template drops it.
        earlier, its_form = problem(random, levels=(1, 2)), random.choice(list(FORMS))
        head += [(turn(prompt(earlier, its_form, None, random)), 0.05), (written(earlier, its_form) + END, 0.1)]
    head.append((turn(prompt(found, form, remark, random)), 0.05))
    if random.random() < 0.12:
        return head + [(NO_THINK, 0.0), (written(found, form) + END, 1.0)]
    if loop is None and random.random() < LOOP_SHARE[found.level]:
        loop = random.choice(list(DOUBTS))
    thought = trace(found, random, loop)
    text = "\n".join(thought.lines)
    head.append(("<think>\n", 0.0))
    if not thought.loops and random.random() < 0.7:
        return head + [(text + "\n</think>\n\n" + written(found, form) + END, 1.0)]
    # Closed from outside: at the end of a line, or anywhere. A loop that nobody closes has no answer.
    if thought.loops and random.random() < 0.4:
        return head + [(text, 1.0)]
    if thought.loops:
        before, rest = "\n".join(thought.lines[:-1]), thought.lines[-1]
        cut = before + "\n" + rest[: random.randrange(len(rest))]
    elif random.random() < 0.5:
        cut = "\n".join(thought.lines[: random.randrange(len(thought.lines) + 1)])
    else:
        cut = text[: random.randrange(len(text))]
    close, answer = closing(found, form, random)
    # The truth is what follows, also where the reasoning has not found it: so the probabilities of a trial answer say
    # how far the reasoning has come. An early one is a guess, and weighs less.
    is_known = cut.count("\n") >= thought.right
    return head + [(cut, 0.7), (close, 0.0), (answer + END, 1.0 if is_known else 0.4)]


if __name__ == "__main__":
    import random as source

    for seed in range(16):
        print("=" * 20, "".join(text for text, _ in sample(source.Random(seed))), sep="\n")
