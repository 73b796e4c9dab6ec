"""Find tests that wait for time to pass instead of for a condition: ``python -m tests.sleeps``.

Three things make a test fail on a faster or slower machine:

- a sleep (of more than 0) outside of waiting.py, which polls until a condition holds;
- a timeout of less than LEAST_S for the event that the test waits for;
- an assertion about seconds measured by a clock.

Each is listed. Some tests are about time, or assert nothing that depends on the duration. There a
comment on one of the lines (or the one above) says why: ``# time: WHY``. Fix all others: wait for
an event, count steps, or hold an engine in the middle of its work (gates.py).
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
LEAST_S = 20.0
"""Minimum timeout: on the slowest machine, only a hang takes longer."""
WAITS = {"wait", "wait_for", "join", "result", "exception", "timeout", "communicate"}
"""Methods and functions that take a timeout, by position or as one of BOUNDS."""
BOUNDS = {"timeout", "timeout_s"}
CLOCKS = {"monotonic", "perf_counter", "time"}
WHY = re.compile(r"# time: (\S.*)")
SLEEP_IN_TEXT = re.compile(r"\bsleep\((?!0\))")
Values = dict[str, float]


@dataclass(frozen=True)
class Found:
    where: str
    kind: str
    code: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.code}" + (f"  # {self.why}" if self.why else "")


def number(node: ast.expr, values: Values) -> float | None:
    """Return the value of an expression of literals and module-level numbers (None: no number)."""
    try:
        code = compile(ast.Expression(node), "bound", "eval")
        value = eval(code, {"__builtins__": {}}, dict(values))
    except Exception:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def constants(tree: ast.Module, folder: Path = TESTS) -> Values:
    """Return the module-level numbers of a file, including those imported from other test files."""
    values: Values = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            path = folder.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
            if path.is_file():
                theirs = constants_of(path, folder)
                values |= {
                    a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs
                }
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                told = number(value, values)
                if told is not None:
                    values[target] = told
    return values


@cache
def constants_of(path: Path, folder: Path) -> Values:
    return constants(ast.parse(path.read_text()), folder)


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    [target, *_] = node.targets
    if isinstance(target, ast.Name):
        yield target.id, node.value
    elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        for one, value in zip(target.elts, node.value.elts, strict=False):
            if isinstance(one, ast.Name):
                yield one.id, value


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _reads_clock(node: ast.AST) -> bool:
    """Whether the node calls a clock of the ``time`` module. An object's own ``time()`` is no
    clock."""
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in CLOCKS
        and isinstance(one.func.value, ast.Name)
        and one.func.value.id == "time"
        for one in ast.walk(node)
    )


def _sleeps(call: ast.Call, values: Values) -> bool:
    return _name(call) == "sleep" and not (call.args and number(call.args[0], values) == 0)


def _is_short(call: ast.Call, values: Values) -> bool:
    """Whether the call is given a timeout above 0 and below LEAST_S."""
    given = [keyword.value for keyword in call.keywords if keyword.arg in BOUNDS]
    if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS:
        given += call.args[:2]
    bounds = (number(one, values) for one in given)
    return any(bound is not None and 0 < bound < LEAST_S for bound in bounds)


def _clocked(function: ast.AST) -> set[str]:
    """Return the names in the function that hold values read from a clock."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _reads_clock(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def scan(source: str, where: str) -> list[Found]:
    tree, lines = ast.parse(source), source.splitlines()
    values = constants(tree)
    kinds: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _sleeps(node, values):
            kinds[node] = "sleep"
        elif isinstance(node, ast.Call) and _is_short(node, values):
            kinds[node] = "bound"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kinds |= dict.fromkeys(_asserts_seconds(node), "seconds")
    found = [_found(node, kind, lines, where) for node, kind in kinds.items()]
    return found + list(_in_texts(tree, lines, where))


def _asserts_seconds(function: ast.AST) -> Iterator[ast.Assert]:
    clocked = _clocked(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            names = {one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)}
            if names & clocked or _reads_clock(node.test):
                yield node


def _in_texts(tree: ast.Module, lines: list[str], where: str) -> Iterator[Found]:
    """Yield sleeps in programs that a test holds as text of several lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                line = lines[number - 1]
                if SLEEP_IN_TEXT.search(line):
                    why = WHY.search(line)
                    told = why[1] if why else ""
                    yield Found(f"{where}:{number}", "sleep", line.strip(), told)


def _found(node: ast.AST, kind: str, lines: list[str], where: str) -> Found:
    first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    said = (WHY.search(line) for line in lines[max(0, first - 2) : last])
    why = next((match[1] for match in said if match), "")
    return Found(f"{where}:{first}", kind, lines[first - 1].strip(), why)


def scan_all(folder: Path = TESTS) -> list[Found]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        if path.name not in ("waiting.py", "sleeps.py", "test_sleeps.py"):
            found += scan(path.read_text(), str(path.relative_to(folder.parent)))
    return found


if __name__ == "__main__":
    all_found = scan_all()
    print(*all_found, sep="\n")
    unexplained = [one for one in all_found if not one.why]
    print(f"{len(all_found)} found, {len(unexplained)} of them do not say why")
    sys.exit(bool(unexplained))
