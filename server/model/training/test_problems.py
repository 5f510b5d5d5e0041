"""Tests of the generators, the graders and the traces: `python3 -m unittest` in this folder, without packages.

With the packages of README.md, `test_network.py` tests the network and the export as well.
"""

import json
import random
import re
import unittest

import problem as problems
import suite
import traces
from problem import FORMS, Problem, digest, is_right, normal, numbers, rule, written


def some(count, seed=0, **how):
    source = random.Random(seed)
    return [traces.problem(source, **how) for _ in range(count)]


def arithmetic_faults(text):
    """The equations `a + b = c` of a text that do not hold."""
    faults = []
    for a, sign, b, c in re.findall(r"(?<![\d*+/-] )(?<!\d)(-?\d+) ([+*/-]) (-?\d+) = (-?\d+)(?!\d)(?! [+*/-])", text):
        a, b, c = int(a), int(b), int(c)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]
        if value != c:
            faults.append(f"{a} {sign} {b} = {c}")
    return faults


class Generators(unittest.TestCase):
    def test_a_seed_gives_equal_problems_and_another_one_others(self):
        texts = [[one.question for one in some(50, seed)] for seed in (1, 1, 2)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_the_digest_is_that_of_every_python(self):
        # A changed digest would move problems from one side of the split to the other.
        self.assertEqual(digest("chain", (3, [("+", 4)])), 17775547184978587168)

    def test_every_kind_has_problems_of_each_level_on_both_sides(self):
        for kind in traces.KINDS:
            for level in traces.LEVELS:
                for held_out in (False, True):
                    one = traces.problem(random.Random(1), (kind,), (level,), held_out)
                    self.assertEqual((one.kind, one.level, one.is_held_out), (kind, level, held_out))

    def test_one_problem_of_twenty_is_held_out(self):
        source = random.Random(3)
        found = [
            traces.KINDS[kind](source, level)
            for kind in ("chain", "list", "date", "clock", "record")
            for level in traces.LEVELS
            for _ in range(200)
        ]
        share = sum(one.is_held_out for one in found) / len(found)
        self.assertTrue(0.035 < share < 0.065, share)

    def test_words_around_a_problem_do_not_move_it_across_the_split(self):
        one = some(1)[0]
        other = Problem(one.kind, 4, one.content, "Other words.", None, [], [])
        self.assertEqual(one.is_held_out, other.is_held_out)

    def test_harder_levels_have_longer_work(self):
        for kind in set(traces.KINDS) - {"function"}:
            size = [
                sum(len(" ".join(one.work)) for one in some(150, 4, kinds=(kind,), levels=(level,))) for level in (1, 4)
            ]
            self.assertGreater(size[1], 1.2 * size[0], kind)

    def test_answers_are_right_by_other_means(self):
        for one in some(400, 5, kinds=("chain",)):
            start, steps = one.content
            value = start
            for sign, number in steps:
                value = eval(f"({value}) {sign} {number}")
            self.assertEqual(value, one.answer)
            term = re.match(r"(?:What is|Calculate) (.*?)[?.]$", one.question)
            if term:
                self.assertEqual(eval(term[1]), one.answer)
        for one in some(200, 6, kinds=("output",)):
            printed = []
            exec(re.search(r"```python\n(.*?)\n```", one.question, re.S)[1], {"print": printed.append})
            self.assertEqual(printed, [one.answer])
        for one in some(100, 7, kinds=("function",)):
            space = {}
            exec(one.answer, space)
            last = [value for value in space.values() if callable(value)][-1]
            for arguments, expected in one.cases:
                self.assertEqual(last(*arguments), expected)
        for one in some(300, 8, kinds=("order",)):
            above = {}
            for a, more, b in re.findall(r"(\w+) is (\w+) than (\w+)\.", one.question):
                upper, lower = (a, b) if more in ("taller", "older", "faster") else (b, a)
                above.setdefault(lower, set()).add(upper)
            rank = lambda name: 1 + max([rank(up) for up in above.get(name, ())], default=0)
            wanted, word = re.search(r"Who is the (?:(second|third|fourth) )?(\w+) of", one.question).groups()
            place = {None: 1, "second": 2, "third": 3, "fourth": 4}[wanted]
            count = len(one.candidates)
            self.assertEqual(rank(one.answer), place if word in ("tallest", "oldest", "fastest") else count + 1 - place)

    def test_no_equation_of_right_work_is_wrong(self):
        for one in some(3000, 9):
            for text in [" ".join(one.work)] + [" ".join(check) for check in one.checks]:
                self.assertEqual(arithmetic_faults(text), [], one.question)
        lost = [one.slip.lines for one in some(300, 9, kinds=("chain",)) if one.slip]
        self.assertTrue(all(arithmetic_faults(" ".join(lines)) for lines in lost), "the search finds wrong equations")

    def test_wrong_first_passes_are_wrong_and_end_in_their_answer(self):
        kinds = set()
        for one in some(4000, 10):
            if one.slip:
                kinds.add(one.kind)
                self.assertNotEqual(one.slip.answer, one.answer)
                self.assertTrue(0 <= one.slip.likelihood < 1 and one.slip.reason and one.slip.lines)
        self.assertEqual(kinds, set(traces.KINDS) - {"function"})


class Suite(unittest.TestCase):
    def test_a_suite_has_different_held_out_problems_of_each_kind_and_level(self):
        lines = list(suite.lines(1, 144, 0.5, list(traces.KINDS), list(traces.LEVELS)))
        self.assertEqual(lines, list(suite.lines(1, 144, 0.5, list(traces.KINDS), list(traces.LEVELS))))
        self.assertEqual(len({json.dumps(line["messages"]) for line in lines}), 144)
        cells = [(line["task"], line["about"]["level"]) for line in lines]
        self.assertEqual({cells.count(cell) for cell in cells}, {4})
        remarks = [remark for texts in traces.DOUBTS.values() for remark in texts]
        for line in lines:
            has_remark = any(line["messages"][0]["content"].startswith(remark) for remark in remarks)
            self.assertEqual(line["about"]["loops"], has_remark)
        self.assertTrue(40 < sum(line["about"]["loops"] for line in lines) < 104)

    def test_a_kind_without_enough_problems_ends_with_an_error(self):
        with self.assertRaisesRegex(SystemExit, "function, level 1: fewer than"):
            list(suite.lines(1, 4000, 0.0, ["function"], [1]))


class Graders(unittest.TestCase):
    def test_right_answers_pass_in_every_form_and_those_of_others_do_not(self):
        found = some(600, 11)
        for one, other in zip(found, found[1:]):
            for form in FORMS:
                its_rule = rule(one, form)
                self.assertTrue(is_right(written(one, form), its_rule), (one.question, form))
                self.assertFalse(is_right("", its_rule))
                self.assertFalse(is_right("I do not know.", its_rule))
                if normal(str(one.answer)) not in normal(written(other, form)) and not one.cases:
                    self.assertFalse(is_right(written(other, form), its_rule), (one.answer, other.answer, form))
                if one.slip:
                    wrong = Problem(
                        one.kind, 1, (), "", one.slip.answer, [], [], candidates=one.candidates, subject=one.subject
                    )
                    self.assertFalse(is_right(written(wrong, form), its_rule), (one.question, form))

    def test_rules_are_json_and_survive_it(self):
        for one in some(200, 12):
            for form in FORMS:
                its_rule = rule(one, form)
                self.assertTrue(is_right(written(one, form), json.loads(json.dumps(its_rule))))

    def test_numbers_are_read_as_the_evaluation_reads_them(self):
        self.assertEqual(numbers("7-4 = 3, then -2 and 1.5."), [7, 4, 3, -2, 1.5])

    def test_functions_run_with_limits_and_without_imports(self):
        cases = [{"arguments": [[1, 2, 4]], "expected": 7}]
        for code, expected in [
            ("def f(xs):\n    return sum(xs)", True),
            ("def f(xs):\n    return max(xs)", False),
            ("import os\ndef f(xs):\n    return 7", False),
            ("def f(xs):\n    return ().__class__", False),
            ("def f(xs):\n    return sum(x for x in range(10 ** 12))", False),
            ("x = 7", False),
        ]:
            self.assertEqual(problems.passes(code, cases), expected, code)


class Traces(unittest.TestCase):
    def test_the_answer_stands_early_and_checks_follow(self):
        source, right, size, wrong_first = random.Random(13), 0, 0, 0
        for _ in range(2000):
            one = traces.problem(source)
            found = traces.trace(one, source)
            self.assertIn(traces.short(one), found.lines[found.right])
            self.assertFalse(found.loops)
            self.assertNotIn("  ", "\n".join(found.lines))
            right += sum(map(len, found.lines[: found.right + 1]))
            size += sum(map(len, found.lines))
            wrong_first += found.first != found.right
        self.assertTrue(0.2 < right / size < 0.5, right / size)
        self.assertTrue(0.07 < wrong_first / 2000 < 0.25, wrong_first)

    def test_a_wrong_first_answer_is_corrected_before_the_end(self):
        source, seen = random.Random(14), 0
        for _ in range(1500):
            one = traces.problem(source)
            found = traces.trace(one, source)
            if found.first != found.right:
                seen += 1
                self.assertIn(problems.plain(one.slip.answer), found.lines[found.first])
                self.assertIn("That is not", found.lines[found.right])
        self.assertGreater(seen, 80)

    def test_remarks_that_loop_have_traces_without_an_end(self):
        source = random.Random(15)
        for kind in traces.DOUBTS:
            found = traces.trace(traces.problem(source), source, kind)
            self.assertTrue(found.loops)
            self.assertGreater(len(found.lines[-1]), 300)
        loops = {
            kind: traces.cycle(traces.problem(random.Random(1)), kind, random.Random(2), 8) for kind in traces.DOUBTS
        }
        self.assertEqual(len(set(loops["repeat"])), 1)
        self.assertEqual(len({re.sub(r"\d+", "0", text, count=1) for text in loops["count"]}), 1)
        self.assertEqual(len(set(loops["count"])), 8)
        self.assertGreater(len(set(loops["reword"])), 3)
        self.assertTrue(all(a != b for a, b in zip(loops["reword"], loops["reword"][1:])))

    def test_samples_never_hold_a_problem_that_is_held_out(self):
        # Kinds with few contents would repeat a held-out one soon.
        held = {one.question for one in some(100, 16, kinds=("function",), held_out=True)}
        held |= {one.question for one in some(300, 17, levels=(1,), held_out=True)}
        source, drawn = random.Random(18), []
        kinds = dict(traces.KINDS)
        try:
            for name, make in kinds.items():
                traces.KINDS[name] = lambda source, level, make=make: drawn.append(make(source, level)) or drawn[-1]
            texts = ["".join(text for text, _ in traces.sample(source)) for _ in range(3000)]
        finally:
            traces.KINDS.update(kinds)
        self.assertTrue(any(one.is_held_out for one in drawn), "the generators draw both sides")
        for one in drawn:
            if one.is_held_out and len(one.question) > 30:
                held.add(one.question)
        for text in texts:
            for user in re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.S):
                for question in (user, user.rpartition("\n")[0]):
                    self.assertNotIn(question, held)

    def test_samples_close_reasoning_as_policies_do(self):
        source = random.Random(19)
        texts = ["".join(text for text, _ in traces.sample(source)) for _ in range(1500)]
        for mark in (
            "**Final Answer:**\n\n",
            "**Final JSON:**\n\n```json\n",
            "**Final Code:**\n\n```python\n",
            "<think>\n\n</think>\n\n",
        ):
            self.assertTrue(any(mark in text for text in texts), mark)
        # A loop that nobody closes has no end.
        self.assertTrue(any("</think>" not in text for text in texts))


if __name__ == "__main__":
    unittest.main()
