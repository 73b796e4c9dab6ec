"""Count the statements of the product and list the files of its spine.

A statement is an AST statement node of shipped Python, Triton included. Docstrings do not count. A
tuple assigned to a tuple of names counts once for each value, so that packing assignments into one
line gains nothing. Generated code, the load generator (``cluster/bench``), C++ and .proto files are
not counted.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "cluster",
    "colocated_node",
    "core",
    "decode_node",
    "kv_transfer",
    "model",
    "prefill_node",
    "runtime",
    "src/tandem",
    "text",
    "net",
)
MAX_STATEMENTS = 17_500
"""Bound on the statements of the product, with everything that is planned."""
MAX_SPINE_STATEMENTS = 5_500
MAX_FUNCTION_LINES = 70
"""Bound on the lines of a function without its docstring."""
MAX_KERNEL_LINES = 90
"""The same for a function in ``model/kernels/gpu``: a Triton kernel cannot be divided freely."""
MAX_FILE_LINES = 400
SPINE = {
    "cluster/client": ("client", "options", "stream"),
    "cluster/entrypoints": ("request_mapping", "servicer"),
    "cluster/gateway": (
        *("admission", "answer", "checks", "fleet", "flow", "frame_reader", "gateway", "handles"),
        *("liveness", "router"),
    ),
    "core": ("answer", "draft_shapes", "request"),
    "decode_node": ("engine",),
    "decode_node/planning": (
        *(
            "program_table",
            "draft_length",
            "acceptance_stats",
            "scheduler",
            "states",
            "step_plan",
            "step_planner",
        ),
    ),
    "decode_node/program": ("launcher", "programs", "rows", "step"),
    "decode_node/service": ("decode_calls", "publisher", "rank", "sessions"),
    "kv_transfer": ("messages", "pages", "pull", "sink", "source"),
    "model/drafters": ("base", "mtp", "mtp_rows"),
    "model/kernels": ("base", "recorded"),
    "model/network": ("batch", "deepseek", "layers", "mla", "moe"),
    "model/network/dispatch": ("base",),
    "model/sampling": ("sampler",),
    "model/sampling/acceptance": ("__init__", "base", "strict"),
    "prefill_node": ("engine", "prefill_calls", "rank", "scheduler", "sequence"),
    "runtime": ("frames",),
    "text": ("stop_text",),
}
"""Files on the path of a greedy split request with MTP, in the order of docs/structure.md."""


def names(listed: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the paths of the listed files."""
    return {f"{folder}/{name}.py" for folder, files in listed.items() for name in files}


def product() -> list[str]:
    """Return the path of every file that counts, relative to the root of the repository."""
    found = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    files = sorted(str(path.relative_to(ROOT)) for path in found)
    return [file for file in files if "_pb2" not in file and not file.startswith("cluster/bench/")]


def module_name(file: str) -> str:
    """Return the name by which the product's ``file`` is imported."""
    path = file.removeprefix("src/tandem/")
    return f"tandem.{path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def num_statements(source: str) -> int:
    """Return the number of statements in ``source``, by the rule above."""
    nodes = ast.walk(ast.parse(source))
    return sum(_weight(node) for node in nodes if isinstance(node, ast.stmt))


def function_lines(source: str) -> dict[str, int]:
    """Return the lines of each function of ``source`` without its docstring, by name and line."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[f"{node.name}:{node.lineno}"] = _span(node) - _span_of_docstring(node)
    return found


def _weight(node: ast.stmt) -> int:
    if _is_docstring(node):
        return 0
    match node:
        case ast.Assign(targets=targets, value=ast.Tuple(elts=values)):
            is_packed = any(isinstance(target, ast.Tuple) for target in targets)
            return len(values) if is_packed else 1
        case _:
            return 1


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _span(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _span_of_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return _span(first) if _is_docstring(first) else 0
