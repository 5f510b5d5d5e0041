"""Kinds of problems about texts: dates, clock times, orders of people, records, and rules."""

import datetime

from kinds_numbers import NAMES, listed, subtract
from problem import Problem, Slip

CITIES = "Rome Paris Oslo Cairo Lima Tokyo Delhi Quito Berlin Madrid Vienna Dublin Athens Lisbon Warsaw Prague".split()
MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def day_of(date, has_year=False):
    return f"{date.day} {MONTHS[date.month - 1]}" + (f" {date.year}" if has_year else "")


def is_leap(year):
    return year % 4 == 0


def length_of(month, year, has_leap_day=True):
    """Days of a month, in 2001 to 2099."""
    return 28 + (is_leap(year) and has_leap_day) if month == 2 else 30 if month in (4, 6, 9, 11) else 31


def walk(date, days, has_leap_day=True):
    """The lines that count days forward through the months, and the date they lead to."""
    day, month, year, left, lines = date.day, date.month, date.year, days, []
    while True:
        length = length_of(month, year, has_leap_day)
        name = MONTHS[month - 1]
        if day + left <= length:
            lines.append(f"{day} + {left} = {day + left}, which is in {name}: {day + left} {name}.")
            return lines, f"{day + left} {name}"
        rest = length - day
        lines.append(
            f"{name} {year} has {length} days, so {rest} of the {left} days are in it. {subtract(left, rest)}."
        )
        left, day, month = left - rest, 0, month + 1
        if month > 12:
            month, year = 1, year + 1


def dates(random, level):
    """The date or the weekday after a number of days, or the days between two dates."""
    year = random.choice([random.randrange(2001, 2060), random.randrange(2004, 2060, 4)])
    date = datetime.date(year, 1, 1) + datetime.timedelta(random.randrange(365))
    if random.random() < 0.4:
        date = datetime.date(year, random.choice([1, 2]), random.randrange(15, 29))
    days = random.randrange(2, [20, 45, 80, 130][level - 1])
    end = date + datetime.timedelta(days)
    crosses = is_leap(date.year) and date <= datetime.date(date.year, 2, 29) < end
    what = random.choice(["date", "date", "between", "weekday"])
    lines, _ = walk(date, days)
    wrong_lines, wrong = walk(date, days, has_leap_day=False)
    reason = f"{year} is a leap year, so February has 29 days"
    # People forget the leap day, and so do models.
    likely = 0.65 if crosses else 0.0
    if what == "weekday":
        start = random.randrange(7)
        days = random.randrange(3, [12, 40, 120, 400][level - 1])
        rest, answer = days % 7, WEEKDAYS[(start + days) % 7]
        question = f"Today is {WEEKDAYS[start]}. Which weekday is it in {days} days?"
        lines = [
            f"{days} = {days // 7} * 7 + {rest}.",
            f"{rest} days after {WEEKDAYS[start]}: "
            + ", ".join(WEEKDAYS[(start + i) % 7] for i in range(rest + 1))
            + ".",
        ]
        less = days // 7 * 7
        checks = [
            [
                f"{days // 7} weeks are {less} days, and {subtract(days, less)}. {WEEKDAYS[start]} and {rest} more days is {answer}."
            ],
            [
                f"Backwards from {answer}: "
                + ", ".join(WEEKDAYS[(start + rest - i) % 7] for i in range(rest + 1))
                + f". That is {WEEKDAYS[start]}, as today."
            ],
        ]
        # Counting today as the first day is the usual mistake; a full week hides it.
        slip = (
            Slip(
                [lines[0], f"{rest} days: " + ", ".join(WEEKDAYS[(start + i) % 7] for i in range(rest)) + "."],
                WEEKDAYS[(start + rest - 1) % 7],
                "I counted today as a day",
                0.5 if rest == 6 else 0.04,
            )
            if rest > 1
            else None
        )
        return Problem(
            "date", level, (what, start, days), question, answer, lines, checks, slip, WEEKDAYS, subject="The weekday"
        )
    if what == "date":
        question = random.choice(
            [
                f"Which date is {days} days after {day_of(date, True)}? Give day and month.",
                f"A parcel is sent on {day_of(date, True)} and arrives {days} days later. On which day and month does it arrive?",
            ]
        )
        slip = Slip(wrong_lines, wrong, reason, likely) if crosses else None
        back = [f"Back from {day_of(end)}: " + back_to(date, end)]
        return Problem(
            "date",
            level,
            (what, date.toordinal(), days),
            question,
            day_of(end),
            lines,
            [back, ["Again: "] + lines],
            slip,
            subject="The date",
        )
    question = f"How many days are there from {day_of(date, True)} to {day_of(end, True)}?"
    lines, parts = between(date, end, True)
    wrong_lines, wrong_parts = between(date, end, False)
    slip = Slip(wrong_lines, sum(wrong_parts), reason, likely) if crosses else None
    forward = walk(date, days)[0]
    return Problem(
        "date",
        level,
        (what, date.toordinal(), days),
        question,
        days,
        lines,
        [[f"{days} days after {day_of(date)}: "] + forward, ["In sum: " + " + ".join(map(str, parts)) + f" = {days}."]],
        slip,
        subject="The number of days",
    )


def back_to(date, end):
    """A line that counts back from the end to the date."""
    parts, day, month, year = [], end.day, end.month, end.year
    while (month, year) != (date.month, date.year):
        parts.append(f"{day} days in {MONTHS[month - 1]}")
        month, year = (month - 1, year) if month > 1 else (12, year - 1)
        day = length_of(month, year)
    parts.append(f"{day - date.day} in {MONTHS[month - 1]}")
    return ", ".join(parts) + f", together {(end - date).days}. That leads to {day_of(date)}."


def between(date, end, has_leap_day):
    """The lines that add up the days from a date to another one, and the days by month."""
    if (date.month, date.year) == (end.month, end.year):
        return [f"Both are in {MONTHS[date.month - 1]}: {end.day} - {date.day} = {end.day - date.day}."], [
            end.day - date.day
        ]
    month, year = date.month, date.year
    parts, lines = [], []
    length = length_of(month, year, has_leap_day)
    parts.append(length - date.day)
    lines.append(f"{MONTHS[month - 1]} {year} has {length} days: {length} - {date.day} = {parts[0]}.")
    while True:
        month, year = (month + 1, year) if month < 12 else (1, year + 1)
        if (month, year) == (end.month, end.year):
            break
        parts.append(length_of(month, year, has_leap_day))
        lines.append(f"{MONTHS[month - 1]} has {parts[-1]} days, so far {sum(parts)}.")
    parts.append(end.day)
    lines.append(f"In {MONTHS[end.month - 1]} there are {end.day}: {sum(parts[:-1])} + {end.day} = {sum(parts)}.")
    return lines, parts


def clock(minutes):
    return f"{minutes // 60 % 24}:{minutes % 60:02}"


def clocks(random, level):
    """When something ends that begins at a time and lasts a while, with breaks at higher levels."""
    start = random.randrange(6 * 60, 18 * 60)
    if level == 1:
        start = start // 5 * 5
    spans = [random.randrange(15, [90, 170, 200, 260][level - 1]) for _ in range([1, 1, 2, 3][level - 1])]
    what = random.choice(["train", "film", "shift"])
    says = {
        "train": "A train leaves at {} and travels {}",
        "film": "A film begins at {} and lasts {}",
        "shift": "Work begins at {} and goes on for {}",
    }[what]

    def span(minutes):
        hours, rest = divmod(minutes, 60)
        words = [f"{hours} hour{'s' * (hours != 1)}"] * (hours > 0) + [f"{rest} minutes"] * (rest > 0)
        return " and ".join(words)

    question = says.format(clock(start), span(spans[0]))
    question += "".join(
        f", then there is {'a break' if i % 2 == 0 else 'another part'} of {span(minutes)}"
        for i, minutes in enumerate(spans[1:])
    )
    question += (
        ". At what time is it over?" if len(spans) > 1 else f". When does it {'arrive' if what == 'train' else 'end'}?"
    )
    end = start + sum(spans)

    def lines_with(carry):
        hour, minute, lines = start // 60, start % 60, []
        for length in spans:
            hours, minutes = divmod(length, 60)
            total = minute + minutes
            if total >= 60:
                lines.append(
                    f"Minutes: {minute} + {minutes} = {total}, that is {'1 hour and ' if carry else ''}{total - 60}. Hours: {hour} + {hours}{' + 1' if carry else ''} = {hour + hours + carry}."
                )
                hour, minute = hour + hours + carry, total - 60
            else:
                lines.append(f"Minutes: {minute} + {minutes} = {total}. Hours: {hour} + {hours} = {hour + hours}.")
                hour, minute = hour + hours, total
            lines[-1] += f" It is {clock(hour * 60 + minute)}."
        return lines, clock(hour * 60 + minute)

    lines, answer = lines_with(1)
    wrong_lines, wrong = lines_with(0)
    checks = [
        [
            f"Back from {answer}: "
            + ", ".join(
                f"minus {span(length)} is {clock(end - sum(spans[-1 - i:]))}"
                for i, length in enumerate(reversed(spans))
            )
            + ". That is the start."
        ],
        [
            f"From {clock(start)} to the full hour it is {60 - start % 60} minutes. In minutes: {start} + {listed(spans).replace(', ', ' + ')} = {end}, and {end} = {end // 60} * 60 + {end % 60}, so it is {answer}."
        ],
        ["Again: "] + lines,
    ]
    slip = None
    if wrong != answer:
        # Sums of minutes just above 60 look like no overflow.
        near = 60 <= (start % 60) + spans[0] % 60 < 75
        slip = Slip(wrong_lines, wrong, "60 minutes make another hour", 0.55 if near else 0.04)
    return Problem("clock", level, (start, spans), question, answer, lines, checks, slip, subject="The time")


RELATIONS = [
    ("taller", "shorter", "tallest", "shortest"),
    ("older", "younger", "oldest", "youngest"),
    ("faster", "slower", "fastest", "slowest"),
]
PLACES = ["", "second ", "third ", "fourth "]


def order(random, level):
    """Who is at a place of an order that clues about neighbours tell."""
    # More than the three people of the puzzles in corpus.py, so that no held-out problem is among those.
    count = 3 + level
    people = random.sample(NAMES, count)
    more, less, most, least = random.choice(RELATIONS)
    clues, flipped = [], None
    flip = random.randrange(count - 1) if random.random() < 0.6 else None
    for i, (one, other) in enumerate(zip(people, people[1:])):
        clues.append((i, f"{other} is {less} than {one}." if i == flip else f"{one} is {more} than {other}."))
    random.shuffle(clues)
    place = random.randrange(min(count, len(PLACES)))
    from_top = random.random() < 0.6
    answer = people[place] if from_top else people[-1 - place]
    wanted = PLACES[place] + (most if from_top else least)
    question = " ".join(text for _, text in clues) + f" Who is the {wanted} of the {count}?"

    def arranged(clues_in_order, says):
        """Lines that put the people in order, clue by clue."""
        lines, groups = [], []
        for i, _ in clues_in_order:
            one, other = says(i)
            left = next((g for g in groups if g[-1] == one), None)
            right = next((g for g in groups if g[0] == other), None)
            new = (left or [one]) + (right or [other])
            groups = [g for g in groups if g is not left and g is not right] + [new]
            lines.append(" > ".join(new) + ".")
        return lines, groups

    says = lambda i: (people[i], people[i + 1])
    lines, _ = arranged(clues, says)
    lines[-1] = "Together: " + " > ".join(people) + f", from {most} to {least}."
    lines.append(f"The {wanted} is {answer}.")
    by_place = sorted(clues)
    checks = [
        ["The clues again: " + " ".join(text + " Yes." for _, text in by_place)],
        [f"From {least} to {most}: " + " < ".join(reversed(people)) + f". The {wanted} is {answer}."],
    ]
    slip = None
    if flip in (0, count - 2):
        # The clue that is turned around is read the other way, at an end of the order.
        wrong = people[:]
        at = flip
        wrong[at], wrong[at + 1] = wrong[at + 1], wrong[at]
        guess = wrong[place] if from_top else wrong[-1 - place]
        if guess != answer:
            slip = Slip(
                ["In order: " + " > ".join(wrong) + ".", f"The {wanted} is {guess}."],
                guess,
                f"the clue is that {people[flip + 1]} is {less} than {people[flip]}",
                0.55,
            )
    return Problem(
        "order",
        level,
        (people, more, flip, [i for i, _ in clues], place, from_top),
        question,
        answer,
        lines,
        checks,
        slip,
        people,
        subject=f"The {wanted}",
    )


def records(random, level):
    """A question about people in a text: an extreme, a count, a list, a sum."""
    count = [3, 4, 6, 8][level - 1]
    names = random.sample(NAMES, count)
    ages = random.sample(range(18, 90), count)
    cities = [random.choice(random.sample(CITIES, 3 + level)) for _ in range(count)]
    city = random.choice(cities)
    people = list(zip(names, ages, cities))
    forms = ["{0} is {1} and lives in {2}.", "{0}, aged {1}, comes from {2}.", "In {2} lives {0}, who is {1}."]
    text = " ".join(random.choice(forms).format(*person) for person in people)
    what = random.choice(["oldest", "youngest", "count", "names", "sum", "city"])
    slip = None
    candidates, subject = [], "The answer"
    if what in ("oldest", "youngest"):
        best = max if what == "oldest" else min
        age = best(ages)
        at = ages.index(age)
        answer, question = names[at], f"Who is the {what} of them?"
        candidates, subject = names, f"The {what}"
        lines = [
            "The ages: " + ", ".join(f"{n} {a}" for n, a, _ in people) + ".",
            f"The {'largest' if what == 'oldest' else 'smallest'} is {age}, of {answer}.",
        ]
        ranked = sorted(zip(ages, names), reverse=what == "oldest")
        checks = [
            ["In order: " + ", ".join(f"{n} {a}" for a, n in ranked) + f". {answer} is first."],
            [
                " ".join(
                    f"{names[i]} is {ages[i]}, {'less' if what == 'oldest' else 'more'} than {age}."
                    for i in range(count)
                    if i != at
                )
            ],
        ]
        if at == count - 1:
            other = best(ages[:-1])
            guess = names[ages.index(other)]
            slip = Slip(
                [
                    "The ages: " + ", ".join(f"{n} {a}" for n, a, _ in people[:-1]) + ".",
                    f"The {'largest' if what == 'oldest' else 'smallest'} is {other}, of {guess}.",
                ],
                guess,
                f"I left out {names[-1]}, who is {age}",
                0.5,
            )
    elif what in ("count", "names"):
        there = [n for n, _, c in people if c == city]
        answer = len(there) if what == "count" else there
        question = (
            f"How many of them are in {city}?"
            if what == "count"
            else f"List the names of those who are in {city}, in the order of the text."
        )
        subject = "The number" if what == "count" else "The list"
        lines = [
            "The cities: " + ", ".join(f"{n} {c}" for n, _, c in people) + ".",
            f"In {city}: {listed(there)}." + (f" That makes {len(there)}." if what == "count" else ""),
        ]
        elsewhere = [n for n, _, c in people if c != city]
        checks = [
            [
                f"Not in {city} are {listed(elsewhere) or 'none'}. "
                + f"That leaves {listed(there)}, {len(there)} of {count}."
            ],
            ["One by one: " + ", ".join(f"{n} {'yes' if c == city else 'no'}" for n, _, c in people) + "."],
        ]
        if len(there) > 1 and there[-1] == names[-1]:
            seen = there[:-1]
            slip = Slip(
                [f"In {city}: {listed(seen)}." + (f" That makes {len(seen)}." if what == "count" else "")],
                len(seen) if what == "count" else seen,
                f"{names[-1]} at the end is in {city} too",
                0.5,
            )
    elif what == "sum":
        one, other = random.sample(range(count), 2)
        answer = ages[one] + ages[other]
        question = f"How old are {names[one]} and {names[other]} together?"
        city = [one, other]
        subject = "Their age together"
        lines = [
            f"{names[one]} is {ages[one]}, {names[other]} is {ages[other]}.",
            f"{ages[one]} + {ages[other]} = {answer}.",
        ]
        checks = [
            [f"{answer} - {ages[other]} = {ages[one]}, the age of {names[one]}."],
            [f"The other way: {ages[other]} + {ages[one]} = {answer}."],
        ]
        if ages[one] % 10 + ages[other] % 10 >= 10:
            slip = Slip(
                [lines[0], f"{ages[one]} + {ages[other]} = {answer - 10}."],
                answer - 10,
                "I lost a carry",
                0.55 if ages[one] % 10 + ages[other] % 10 >= 16 else 0.03,
            )
    else:
        at = ages.index(max(ages))
        answer, question = cities[at], "In which city is the oldest of them?"
        city, subject = None, "The city"
        candidates = sorted(set(cities))
        lines = [
            "The ages: " + ", ".join(f"{n} {a}" for n, a, _ in people) + ".",
            f"The oldest is {names[at]} with {ages[at]}, in {answer}.",
        ]
        checks = [
            [f"Nobody is above {ages[at]}: {listed(sorted(ages, reverse=True))}. {names[at]} is in {answer}."],
            ["Again: "] + lines,
        ]
    return Problem(
        "record",
        level,
        (what, city, people),
        f"{text}\n{question}",
        answer,
        lines,
        checks,
        slip,
        candidates,
        subject=subject,
    )
