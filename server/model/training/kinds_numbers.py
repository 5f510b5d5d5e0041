"""Kinds of problems about numbers: chains of operations, stories, lists, and short programs.

Each level makes a problem longer, and its numbers larger. `add`, `subtract` and `multiply` write a calculation in the
steps in which a small model can do it.
"""

from problem import Problem, Slip

NAMES = "Anna Boris Clara David Elena Farid Grace Hugo Irene Jonas Karin Liam Maria Nora Oscar Paula Quinn Rosa Simon Tara".split()
ITEMS = "lamps chairs pens books ropes tents boots maps bells coins".split()


def add(a, b):
    """A sum in steps: the tens and the ones of the second number, one after the other."""
    if b < 10 or a < 10:
        return f"{a} + {b} = {a + b}"
    tens, ones = b // 10 * 10, b % 10
    if ones == 0:
        return f"{a} + {b} = {a + b}"
    return f"{a} + {b}: {a} + {tens} = {a + tens}, {a + tens} + {ones} = {a + b}"


def subtract(a, b):
    tens, ones = b // 10 * 10, b % 10
    if tens == 0 or ones == 0:
        return f"{a} - {b} = {a - b}"
    return f"{a} - {b}: {a} - {tens} = {a - tens}, {a - tens} - {ones} = {a - b}"


def multiply(a, b):
    """A product with a number of one digit, in the parts of the other one."""
    parts = [(digit * 10**place) for place, digit in enumerate(map(int, reversed(str(a)))) if digit][::-1]
    if len(parts) < 2:
        return f"{a} * {b} = {a * b}"
    products = [part * b for part in parts]
    text = ", ".join(f"{part} * {b} = {product}" for part, product in zip(parts, products))
    return f"{a} * {b}: {text}, " + " + ".join(map(str, products)) + f" = {a * b}"


STEP = {"+": add, "-": subtract, "*": multiply}
APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
UNDO = {"+": "-", "-": "+", "*": "/"}


def lost_carry(a, b):
    """The sum without the carry of the ones, or None where there is none."""
    return a + b - 10 if a % 10 + b % 10 >= 10 and b >= 10 else None


def chain(random, level):
    """A start and operations, one after the other."""
    count, top = [(2, 30), (3, 60), (4, 99), (6, 250)][level - 1]
    start = value = random.randrange(2, top)
    steps, values = [], [start]
    for _ in range(count):
        signs = ["+"] * 3 + ["-"] * 2 * (value > 5) + ["*"] * 2 * (value < 120)
        sign = random.choice(signs)
        number = random.randrange(2, 10) if sign == "*" else random.randrange(2, value if sign == "-" else top)
        value = APPLY[sign](value, number)
        steps.append((sign, number))
        values.append(value)
    words = {
        "+": ["Add {}.", "Then add {}."],
        "-": ["Subtract {}.", "Take away {}."],
        "*": ["Multiply by {}.", "Multiply the result by {}."],
    }
    if random.random() < 0.6:
        question = (
            f"Start with {start}. "
            + " ".join(random.choice(words[sign]).format(number) for sign, number in steps)
            + " What is the result?"
        )
    else:
        term = str(start)
        for i, (sign, number) in enumerate(steps):
            is_sum = i > 0 and steps[i - 1][0] != "*"
            term = f"({term}) * {number}" if sign == "*" and is_sum else f"{term} {sign} {number}"
        question = random.choice(["What is {}?", "Calculate {}."]).format(term)
    lines = [STEP[sign](value, number) + "." for value, (sign, number) in zip(values, steps)]
    backwards = [
        f"Backwards: "
        + ", ".join(
            f"{values[i + 1]} {UNDO[sign]} {number} = {values[i]}"
            for i, (sign, number) in reversed(list(enumerate(steps)))
        )
        + f". It begins with {start}, so {value} is right."
    ]
    again = ["Step by step: " + ", ".join(map(str, values)) + f". That is {value}."]
    slip = None
    for i, (sign, number) in enumerate(steps):
        wrong = lost_carry(values[i], number) if sign == "+" else None
        if wrong is not None and wrong > 9:
            bad, text = wrong, [f"{values[i]} + {number} = {wrong}."]
            for sign_after, number_after in steps[i + 1 :]:
                text.append(f"{bad} {sign_after} {number_after} = {APPLY[sign_after](bad, number_after)}.")
                bad = APPLY[sign_after](bad, number_after)
            if bad >= 0 and bad != value:
                # Sums of two numbers that both end in a large digit are where a carry is lost.
                likely = 0.6 if values[i] % 10 >= 6 and number % 10 >= 6 else 0.04
                slip = Slip(
                    lines[:i] + text,
                    bad,
                    f"I lost the carry in {values[i]} + {number}, which is {values[i + 1]}",
                    likely,
                )
            break
    return Problem(
        "chain", level, (start, steps), question, value, lines, [backwards, again, ["Again: "] + lines], slip
    )


def story(random, level):
    """Things that a person has, buys and gives away."""
    name, item = random.choice(NAMES), random.choice(ITEMS)
    has, boxes, each = (
        random.randrange(5, 20 + 40 * level),
        random.randrange(2, 4 + level),
        random.randrange(3, 8 + 4 * level),
    )
    total = has + boxes * each
    gives = random.randrange(2, min(total, 20 + 30 * level))
    left = total - gives
    friends = random.choice([n for n in range(2, 10) if left % n == 0] or [1]) if level >= 3 else 1
    if level == 4 and friends == 1:
        gives += left % 3
        left, friends = total - gives, 3
    result = left // friends
    is_late = random.random() < 0.4
    parts = [f"{name} has {has} {item}.", f"{name} buys {boxes} boxes with {each} {item} each."]
    if not is_late:
        parts.append(f"Then {name} gives {gives} {item} away.")
    if friends > 1:
        parts.append(f"The rest is shared equally among {friends} people.")
        ask = f"How many {item} does each of them get"
    else:
        ask = f"How many {item} does {name} have now"
    # What stands after the question is easily left out.
    question = (
        " ".join(parts) + f" {ask}?" + (f" Note that {gives} of all these were given away before." if is_late else "")
    )
    bought = boxes * each
    lines = [
        f"{boxes} boxes with {each} each: {multiply(each, boxes)}.",
        f"{add(has, bought)}.",
        f"{gives} are given away: {subtract(total, gives)}.",
    ]
    if friends > 1:
        lines.append(f"Among {friends} people: {left} / {friends} = {result}.")
    back = f"{result} * {friends} = {left}, " if friends > 1 else ""
    check = [
        f"Backwards: {back}{left} + {gives} = {total}, {total} - {bought} = {has}. That is what {name} has at first, so {result} is right."
    ]
    again = [
        f"All in one: {has} + {boxes} * {each} - {gives} = {left}"
        + (f", and {left} / {friends} = {result}." if friends > 1 else ".")
    ]
    wrong = total // friends if total % friends == 0 else None
    slip = None
    if wrong is not None and wrong != result:
        text = lines[:2] + ([f"Among {friends} people: {total} / {friends} = {wrong}."] if friends > 1 else [])
        slip = Slip(text, wrong, f"I forgot the {gives} that are given away", 0.55 if is_late else 0.03)
    return Problem(
        "story",
        level,
        (has, boxes, each, gives, friends),
        question,
        result,
        lines,
        [check, again, ["Once more: "] + lines],
        slip,
    )


def listed(xs):
    return ", ".join(map(str, xs))


def totals(xs, start=0):
    """Running sums of a list as a line."""
    parts, total = [], start
    for x in xs:
        parts.append(f"{total} + {x} = {total + x}")
        total += x
    return ", ".join(parts)


def lists(random, level):
    """A question about a list of numbers."""
    count, top = [(4, 20), (6, 40), (8, 60), (11, 99)][level - 1]
    xs = [random.randrange(1, top) for _ in range(count)]
    is_double = random.random() < 0.35
    if is_double:
        at = random.randrange(count - 1)
        xs[at + 1] = xs[at]
    what = random.choice(["sum", "spread", "above", "second", "even", "index"])
    # A number that comes twice in a row is easily read once.
    once = [x for i, x in enumerate(xs) if i == 0 or x != xs[i - 1]]
    slip = None
    if what == "sum":
        question, answer = f"What is the sum of {listed(xs)}?", sum(xs)
        lines = [f"{totals(xs[1:], xs[0])}."]
        checks = [
            [f"From the end: {totals(xs[-2::-1], xs[-1])}."],
            [
                f"In two halves: {listed(xs[: count // 2])} give {sum(xs[: count // 2])}, {listed(xs[count // 2 :])} give {sum(xs[count // 2 :])}, together {sum(xs)}."
            ],
        ]
        if once != xs:
            slip = Slip(
                [f"{totals(once[1:], once[0])}."],
                sum(once),
                f"the list has {len(xs)} numbers, and I read a repeated one only once",
                0.6,
            )
    elif what == "spread":
        question, answer = f"What is the difference between the largest and the smallest number of {listed(xs)}?", max(
            xs
        ) - min(xs)
        lines = [f"The largest is {max(xs)}, the smallest is {min(xs)}.", f"{subtract(max(xs), min(xs))}."]
        checks = [
            [f"Sorted: {listed(sorted(xs))}. From {min(xs)} to {max(xs)} it is {answer}."],
            [f"{min(xs)} + {answer} = {max(xs)}, which is the largest."],
        ]
    elif what == "above":
        limit = random.randrange(2, top - 1)
        question, answer = f"How many numbers of this list are greater than {limit}: {listed(xs)}?", sum(
            x > limit for x in xs
        )
        over = [x for x in xs if x > limit]
        seen = [x for x in once if x > limit]
        lines = [" ".join(f"{x} {'yes' if x > limit else 'no'}," for x in xs)[:-1] + ".", f"That makes {answer}."]
        checks = [
            [f"Those above {limit}: {listed(over) or 'none'}. There are {answer}."],
            [
                f"Not above are {listed([x for x in xs if x <= limit]) or 'none'}: {count - answer} of {count}, so {count} - {count - answer} = {answer}."
            ],
        ]
        if len(seen) != len(over):
            slip = Slip(
                [f"Above {limit} are {listed(seen)}.", f"That makes {len(seen)}."],
                len(seen),
                "a number that comes twice counts twice",
                0.55,
            )
    elif what == "second":
        distinct = sorted(set(xs), reverse=True)
        if len(distinct) < 2:
            return lists(random, level)
        question, answer = f"What is the second largest of the different numbers in {listed(xs)}?", distinct[1]
        lines = [f"The largest is {distinct[0]}.", f"Without it, the largest is {distinct[1]}."]
        checks = [
            [f"Sorted without repetitions: {listed(distinct)}. The second is {answer}."],
            [f"Only {distinct[0]} is above {answer}."],
        ]
        if xs.count(distinct[0]) > 1:
            slip = Slip(
                [f"Sorted: {listed(sorted(xs, reverse=True))}.", f"The second is {distinct[0]}."],
                distinct[0],
                f"{distinct[0]} comes twice, but the numbers must be different",
                0.6,
            )
    elif what == "even":
        evens = [x for x in xs if x % 2 == 0]
        if len(evens) < 2:
            return lists(random, level)
        question, answer = f"What is the sum of the even numbers in {listed(xs)}?", sum(evens)
        lines = [f"The even numbers are {listed(evens)}.", f"{totals(evens[1:], evens[0])}."]
        checks = [
            [f"From the end: {totals(evens[-2::-1], evens[-1])}."],
            [
                f"Odd are {listed([x for x in xs if x % 2]) or 'none'}. The others are {listed(evens)}, and their sum is {answer}."
            ],
        ]
        seen = [x for x in once if x % 2 == 0]
        if seen != evens and len(seen) > 1:
            slip = Slip(
                [f"The even numbers are {listed(seen)}.", f"{totals(seen[1:], seen[0])}."],
                sum(seen),
                "an even number comes twice, and I took it once",
                0.6,
            )
    else:
        place = random.randrange(2, count + 1)
        question, answer = (
            f"Which number stands at place {place} of this list, counted from the end: {listed(xs)}?",
            xs[-place],
        )
        lines = ["From the end: " + ", ".join(f"{i + 1} is {x}" for i, x in enumerate(reversed(xs[-place:]))) + "."]
        checks = [
            [
                f"The list has {count} numbers, so it is place {count - place + 1} from the beginning: "
                + ", ".join(f"{i + 1} is {x}" for i, x in enumerate(xs[: count - place + 1]))
                + "."
            ],
            ["Reversed: " + listed(xs[::-1]) + f". Place {place} is {answer}."],
        ]
        if xs[place - 1] != answer:
            slip = Slip(
                ["The list: " + ", ".join(f"{i + 1} is {x}" for i, x in enumerate(xs[:place])) + "."],
                xs[place - 1],
                "I counted from the beginning",
                0.5 if place == 2 else 0.03,
            )
    content = (what, xs, limit if what == "above" else place if what == "index" else 0)
    return Problem("list", level, content, question, answer, lines, checks, slip)


def output(random, level):
    """What a short program prints."""
    times, value, number = 1 + level, random.randrange(1, 12), random.randrange(2, 9)
    first = random.choice([0, 0, 1, 2])
    sign = random.choice(
        ["+ i", "* 2 + i", f"+ {number}", f"* 2 - {number}" if level < 4 else f"+ {number} * i", "- i + 7"]
    )
    has_if = level >= 2 and random.random() < 0.4
    # `range(1, n)` reads as if it had n rounds.
    stop = first + times
    source = f"x = {value}\nfor i in range({f'{first}, ' if first else ''}{stop}):\n"
    source += (
        f"    if i % 2 == 0:\n        x = x {sign}\n    else:\n        x = x + 1\nprint(x)"
        if has_if
        else f"    x = x {sign}\nprint(x)"
    )

    def run(rounds):
        x, text = value, []
        for i in rounds:
            term = "+ 1" if has_if and i % 2 else sign
            new = eval(f"{x} {term}".replace("i", str(i)))
            text.append(f"i = {i}: x = {x} {term.replace('i', str(i))} = {new}.")
            x = new
        return x, text

    answer, lines = run(range(first, stop))
    wrong, text = run(range(first, stop + 1))
    rounds = listed(range(first, stop))
    values = [value]
    for i in range(first, stop):
        values.append(run(range(first, i + 1))[0])
    checks = [
        [f"The values of i are {rounds}. x goes {listed(values)}. At the end it is {answer}."],
        ["Round by round: "] + lines,
        [f"range ends before {stop}, so the last i is {stop - 1}, after which x is {answer}."],
    ]
    slip = None
    if wrong != answer:
        slip = Slip(
            text, wrong, f"range ends before {stop}, so there is no round with i = {stop}", 0.6 if first == 1 else 0.03
        )
    content = (value, first, stop, sign, has_if)
    return Problem(
        "output",
        level,
        content,
        f"What does this Python program print?\n```python\n{source}\n```",
        answer,
        lines,
        checks,
        slip,
    )


FILTERS = [("even numbers", "x % 2 == 0", lambda x: x % 2 == 0), ("odd numbers", "x % 2 == 1", lambda x: x % 2 == 1)]
FILTERS += [(f"numbers greater than {k}", f"x > {k}", lambda x, k=k: x > k) for k in range(2, 41)]
FILTERS += [(f"numbers less than {k}", f"x < {k}", lambda x, k=k: x < k) for k in range(5, 51)]
FILTERS += [(f"multiples of {k}", f"x % {k} == 0", lambda x, k=k: x % k == 0) for k in range(3, 13)]
# How each number is changed, in words that stand before or after those of the filter.
SAME = ("", "", "x", lambda x: x)
MAPS = [("squares of the ", "", "x * x", lambda x: x * x), ("doubles of the ", "", "2 * x", lambda x: 2 * x)]
MORE = [("", f", each plus {k}", f"x + {k}", lambda x, k=k: x + k) for k in range(1, 31)]
MORE += [("", f", each times {k}", f"x * {k}", lambda x, k=k: x * k) for k in range(3, 13)]
ENDS = [("sum", "sum({})", sum), ("number", "len({})", len), ("list", "{}", lambda xs: xs)]


def function(random, level):
    """A function of a list, put together from a filter, a change of each number, and an end."""
    chosen, end = random.choice(FILTERS), random.choice(ENDS)
    change = random.choice([SAME if level == 1 else random.choice(MORE), *MAPS, random.choice(MORE)])
    if end[0] == "number":
        change = SAME
    name = {"sum": "total", "number": "count", "list": "select"}[end[0]]
    loop = level >= 3
    kept = f"{change[0]}{chosen[0]} of a list{change[1]}"
    what = f"the {end[0]} of the {kept}" if end[0] != "list" else f"a list of the {kept}"
    if loop:
        begin, step = {
            "sum": ("0", f"result += {change[2]}"),
            "number": ("0", "result += 1"),
            "list": ("[]", f"result.append({change[2]})"),
        }[end[0]]
        source = f"def {name}(xs):\n    result = {begin}\n    for x in xs:\n        if {chosen[1]}:\n            {step}\n    return result"
        what += ", with a loop"
    else:
        source = f"def {name}(xs):\n    return " + end[1].format(f"[{change[2]} for x in xs if {chosen[1]}]")
    evaluate = lambda xs: end[2]([change[3](x) for x in xs if chosen[2](x)])
    cases = []
    for length in (0, 3, 5, 7):
        xs = [random.randrange(1, 30) for _ in range(length)]
        cases.append(([xs], evaluate(xs)))

    def trial():
        xs = [random.randrange(1, 24) for _ in range(4)]
        kept = [x for x in xs if chosen[2](x)]
        text = f"Test with [{listed(xs)}]: kept are [{listed(kept)}], "
        if change is not SAME:
            text += f"changed to [{listed(change[3](x) for x in kept)}], "
        return [text + f"and the result is {evaluate(xs)}. The function gives that."]

    lines = [
        f"The condition is {chosen[1]}.",
        f"Each number counts as {change[2]}." if change is not SAME else "The numbers stay as they are.",
        {"sum": "They are added.", "number": "They are counted.", "list": "They are collected."}[end[0]],
    ]
    question = f"Write a Python function that returns {what}."
    return Problem(
        "function",
        level,
        (chosen[0], change[2], end[0], loop),
        question,
        source,
        lines,
        [trial(), trial(), ["An empty list: nothing is kept, and the result is " + f"{evaluate([])}. That is fine."]],
        None,
        cases=cases,
        short=end[1].format(f"[{change[2]} for x in xs if {chosen[1]}]"),
    )
