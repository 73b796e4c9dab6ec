"""Lean is a promise to readers: how much there is to read, circles and twin names are held here."""

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.sizes import (
    BESIDE,
    HOUSES,
    MOST_ENTERED,
    MOST_PLANNED,
    MOST_SPINE,
    ROOT,
    SPINE,
    names,
    num_lines,
    product,
)

TWINS = {"Scheduler"}
"""Names of two classes or constants. None may be added; Scheduler is each node's own by intent."""


def lines(files: Iterable[str]) -> dict[str, int]:
    return {file: num_lines((ROOT / file).read_text()) for file in files}


def told(counts: dict[str, int], most: int) -> str:
    rooms: dict[str, int] = defaultdict(int)
    for file, num in counts.items():
        rooms[file.rpartition("/")[0]] += num
    listed = ", ".join(f"{room} {num}" for room, num in sorted(rooms.items()))
    return f"{sum(counts.values())} lines of code where {most} are the most: {listed}"


def test_lines_are_counted_by_the_rule() -> None:
    source = (
        '"""Doc\nof two lines."""\n\n# why\nx = [\n    1,  # one\n]\n\n\ndef f():\n    "Doc."\n'
    )
    assert num_lines(source) == 4
    assert num_lines('x = """text\nthat is a value"""\n') == 2


def test_there_is_no_more_to_read_than_was_promised() -> None:
    counts = lines(product())
    assert len(counts) > 150 and sum(HOUSES.values()) <= MOST_PLANNED
    houses: dict[str, dict[str, int]] = {house: {} for house in HOUSES}
    for file, num in counts.items():
        house = max((one for one in HOUSES if file.startswith(f"{one}/")), key=len)
        houses[house][file] = num
    for house, found in houses.items():
        assert sum(found.values()) <= HOUSES[house], told(found, HOUSES[house])


def test_the_spine_is_an_afternoon() -> None:
    spine, beside = lines(names(SPINE)), lines(names(BESIDE))
    assert not spine.keys() & beside.keys()
    assert sum(spine.values()) <= MOST_SPINE, told(spine, MOST_SPINE)
    entered = spine | beside
    assert sum(entered.values()) <= MOST_ENTERED, told(entered, MOST_ENTERED)


def test_imports_run_in_no_circle() -> None:
    """Those for type checking neither."""
    assert not circles(imported())


def test_no_other_name_is_used_for_two_things() -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for file in product():
        for name in defined(ast.parse((ROOT / file).read_text())):
            owners[name].add(file)
    twins = {name for name, files in owners.items() if len(files) > 1}
    assert twins == TWINS, {name: sorted(owners[name]) for name in twins ^ TWINS}


def defined(module: ast.Module) -> set[str]:
    """Public classes, aliases and constants; type variables are everybody's own."""
    found = set()
    for node in module.body:
        match node:
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if not (isinstance(value, ast.Call) and "TypeVar" in ast.unparse(value.func)):
                    found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return {name for name in found if not name.startswith("_") and name != "log"}


def imported() -> dict[str, set[str]]:
    """The modules of ours that each imports, anywhere in its file."""
    modules = {file[:-3].replace("/", ".").removesuffix(".__init__"): file for file in product()}
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        wanted = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= (parts & modules.keys()) or {str(node.module)}
        found[module] = wanted & modules.keys()
    return found


def circles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Modules that reach each other."""
    reached = {module: reach(graph, module) for module in graph}
    return {
        tuple(sorted(two for two in mine if module in reached[two]))
        for module, mine in reached.items()
        if module in mine
    }


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += graph[module]
    return found
