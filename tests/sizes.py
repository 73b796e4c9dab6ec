"""How much there is to read, and which of it a request walks through.

A line counts if it has a token that is neither comment nor docstring. Counted is what is shipped in
Python, Triton in; generated code, the load generator (``cluster/bench``), C++ and .proto are apart.
"""

import ast
import io
import tokenize
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
    "tandem",
    "text",
    "wires",
)
MOST_PLANNED = 17_000
"""With everything that is planned; nothing that is built changes it."""
HOUSES = {
    "cluster": 3_488,
    "colocated_node": 70,
    "core": 1_079,
    "decode_node": 1_629,
    "kv_transfer": 1_505,
    "model": 3_535,
    "model/kernels": 2_316,
    "prefill_node": 503,
    "runtime": 967,
    "tandem": 15,
    "text": 190,
    "wires": 310,
}
"""The most of each, which together are the most there may be now; 12,766 before houses had bounds
of their own. Whoever builds something of size says how much it adds, and where."""
MOST_SPINE = 5_200
MOST_ENTERED = 7_942
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SPINE = {
    "cluster/client": ("client", "options", "stream"),
    "cluster/door": ("request_mapping", "servicer"),
    "cluster/gateway": (
        *("admission", "answer", "checks", "fleet", "flow", "frame_reader", "gateway", "handles"),
        *("liveness", "router"),
    ),
    "core": ("answer", "levels", "request"),
    "decode_node": ("engine",),
    "decode_node/planning": (
        *("forms", "lengths", "rungs", "scheduler", "states", "step_plan", "step_planner"),
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
"""The path of a greedy split request with MTP, in the order of docs/structure.md: who reads these
files has read how a request is served."""
BESIDE = {
    "cluster/door": ("calls",),
    "cluster/gateway": ("affinity", "fan_out", "recovery", "retries"),
    "cluster/proto": ("mapping",),
    "core": (
        *("beat", "control", "forms", "identity", "membership", "pace", "prefixes", "schema"),
        *("stopping", "tasks"),
    ),
    "decode_node/planning": ("buckets",),
    "decode_node/program": ("clock",),
    "kv_transfer": (
        *("accepted", "base", "caches", "gloo", "layout", "line", "links"),
        *("offered", "staging", "waiting"),
    ),
    "model": ("loaded",),
    "model/checkpoint": ("config", "tensors"),
    "model/kernels": ("native",),
    "model/network": ("experts",),
    "model/sampling": ("thinking",),
    "model/sampling/acceptance": ("paths",),
    "prefill_node": ("page_source", "planner", "prefix_cache"),
    "runtime": ("black_box", "engine_loop", "lockstep", "parts", "watch"),
    "text": ("think", "token_bytes", "tokenizer"),
    "wires": ("calls", "framing", "groups", "listener"),
}
"""What such a request enters besides: nouns, what every rank has, transports, the checkpoint; and
what a rank says of itself when the answer takes longer than a beat."""


def names(listed: dict[str, tuple[str, ...]]) -> set[str]:
    """Paths of the listed files."""
    return {f"{folder}/{name}.py" for folder, files in listed.items() for name in files}


def product() -> list[str]:
    """Every file that counts."""
    found = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    files = sorted(str(path.relative_to(ROOT)) for path in found)
    return [file for file in files if "_pb2" not in file and not file.startswith("cluster/bench/")]


def num_lines(source: str) -> int:
    """Lines of code, by the rule above."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstrings(source))


def _docstrings(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                assert node.end_lineno is not None
                lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines
