"""Bounds on the size of the product. Import cycles and duplicate names are errors."""

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.sizes import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MAX_KERNEL_LINES,
    MAX_SPINE_STATEMENTS,
    MAX_STATEMENTS,
    ROOT,
    SPINE,
    function_lines,
    module_name,
    names,
    num_statements,
    product,
)

TWINS = {"Scheduler"}
"""Names that two classes or constants share. None may be added. Each node has its own Scheduler by
intent."""


def statements(files: Iterable[str]) -> dict[str, int]:
    return {file: num_statements((ROOT / file).read_text()) for file in files}


def report(counts: dict[str, int], bound: int) -> str:
    folders: dict[str, int] = defaultdict(int)
    for file, num in counts.items():
        folders[file.rpartition("/")[0]] += num
    listed = ", ".join(f"{folder} {num}" for folder, num in sorted(folders.items()))
    return f"{sum(counts.values())} statements, at most {bound} are allowed: {listed}"


def test_statements_are_counted_by_the_rule() -> None:
    source = (
        '"""Doc\nof two lines."""\n\n# why\nx = [\n    1,  # one\n]\n\n\ndef f():\n    "Doc."\n'
    )
    assert num_statements(source) == 2
    assert num_statements('x = """text\nthat is a value"""\n') == 1
    assert num_statements("if x: y(); z()\n") == 3


def test_packing_assignments_gains_nothing() -> None:
    assert num_statements("a = 1\nb = 2\n") == num_statements("a, b = 1, 2\n") == 2
    assert num_statements("pair = 1, 2\n") == num_statements("a, b = pair\n") == 1
    assert num_statements("a, (b, c) = 1, two\n") == 2


def test_a_docstring_is_no_line_of_a_function() -> None:
    source = 'def f():\n    """Doc\n    of two lines."""\n    return 1\n'
    assert function_lines(source) == {"f:1": 2}


def test_the_product_has_at_most_so_many_statements() -> None:
    counts = statements(product())
    assert len(counts) > 150
    assert sum(counts.values()) <= MAX_STATEMENTS, report(counts, MAX_STATEMENTS)


def test_the_spine_is_an_afternoon() -> None:
    counts = statements(names(SPINE))
    assert sum(counts.values()) <= MAX_SPINE_STATEMENTS, report(counts, MAX_SPINE_STATEMENTS)


def test_no_function_is_too_long() -> None:
    for file in product():
        is_kernel = file.startswith("model/kernels/gpu/")
        bound = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
        for name, num in function_lines((ROOT / file).read_text()).items():
            assert num <= bound, f"{file}: {name} has {num} lines, at most {bound} are allowed"


def test_no_file_is_too_long() -> None:
    for file in product():
        num = len((ROOT / file).read_text().splitlines())
        assert num <= MAX_FILE_LINES, f"{file} has {num} lines, at most {MAX_FILE_LINES}"


def test_imports_run_in_no_circle() -> None:
    """Imports for type checking form no cycle either."""
    graph = imported()
    assert sum(map(len, graph.values())) > 3 * len(graph), "imports are not understood"
    assert not circles(graph)


def test_no_other_name_is_used_for_two_things() -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for file in product():
        for name in defined(ast.parse((ROOT / file).read_text())):
            owners[name].add(file)
    twins = {name for name, files in owners.items() if len(files) > 1}
    assert twins == TWINS, {name: sorted(owners[name]) for name in twins ^ TWINS}


def defined(module: ast.Module) -> set[str]:
    """Return the public classes, aliases and constants of a module. Type variables may be
    repeated."""
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
    """Return the product modules that each module imports, anywhere in its file."""
    modules = {module_name(file): file for file in product()}
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
    """Return the groups of modules that import each other."""
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
