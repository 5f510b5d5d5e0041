"""Runs a function that a model wrote, and compares its results with expected ones.

Reads {"code": .., "cases": [{"arguments": [..], "expected": ..}]} from stdin and prints {"problem": null or a text}.

The code may use only the syntax, names and methods listed here: no imports, no attributes besides these methods, no
names that begin with an underscore, no files. The process limits its own time, memory and files before it runs the code.
"""
import ast
import json
import resource
import sys

NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For,
    ast.While, ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Raise, ast.Name, ast.Constant, ast.BinOp,
    ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.IfExp, ast.Subscript, ast.Slice, ast.List, ast.Tuple, ast.Dict,
    ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension, ast.JoinedStr,
    ast.FormattedValue, ast.Lambda, ast.Starred, ast.keyword, ast.Attribute, ast.expr_context, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop,
)
METHODS = set(
    "append extend pop insert remove sort reverse index count copy items keys values get update add discard split join "
    "strip lstrip rstrip lower upper title capitalize startswith endswith replace find isdigit isalpha isalnum isspace "
    "isupper islower setdefault union intersection difference".split())
FUNCTIONS = (
    abs, all, any, bool, chr, dict, divmod, enumerate, filter, float, int, isinstance, len, list, map, max, min, ord, pow,
    range, reversed, round, set, sorted, str, sum, tuple, zip, ValueError, TypeError, IndexError, ZeroDivisionError,
)
SECONDS, BYTES = 2, 512 << 20


def forbidden(tree):
    """What the code may not have; None if it has nothing of it."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if not isinstance(node, NODES):
            return f"line {line}: {type(node).__name__} is not allowed"
        if isinstance(node, ast.Attribute) and node.attr not in METHODS:
            return f"line {line}: the attribute {node.attr} is not allowed"
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return f"line {line}: decorators are not allowed"
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
        if isinstance(name, str) and name.startswith("_") and name != "_":
            return f"line {line}: the name {name} is not allowed"
    return None


def run(task):
    try:
        tree = ast.parse(task["code"])
    except (SyntaxError, ValueError) as error:
        return f"is not Python: {error}"
    problem = forbidden(tree)
    if problem:
        return problem
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        return "defines no function"
    builtins = {function.__name__: function for function in FUNCTIONS}
    names = {"__builtins__": builtins | {"print": lambda *_, **__: None}}
    exec(compile(tree, "answer", "exec"), names)
    for case in task["cases"]:
        arguments = json.loads(json.dumps(case["arguments"]))
        found = names[functions[-1]](*arguments)
        if type(found) is bool or found != case["expected"]:  # True equals 1
            return f"{functions[-1]}{tuple(arguments)} is {found!r:.80} instead of {case['expected']!r:.80}"
    return None


def main():
    task = json.load(sys.stdin)
    for limit, value in [(resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, BYTES), (resource.RLIMIT_FSIZE, 0),
                         (resource.RLIMIT_CORE, 0)]:
        resource.setrlimit(limit, (value, value))
    # After this, the limit on files keeps the process from opening any.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    try:
        problem = run(task)
    except BaseException as error:
        problem = f"fails with {type(error).__name__}: {error!s:.80}"
    # Of size 0, the limit on files concerns files only, not pipes.
    print(json.dumps({"problem": problem}))


main()
