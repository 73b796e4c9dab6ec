"""An import only points down (docs/structure.md); optional parts stay out of the way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {
    "core",
    "text",
    "model",
    "kv_transfer",
    "wires",
    "runtime",
    "prefill_node",
    "decode_node",
    "colocated_node",
    "cluster",
    "tandem",
}
MAY_IMPORT = {
    "core": set(),
    "text": {"core"},
    "model": {"core", "text"},
    "wires": {"core"},
    "kv_transfer": {"core", "wires"},
    "runtime": {"core", "model", "kv_transfer", "wires"},
    "prefill_node": {"core", "model", "kv_transfer", "runtime", "wires"},
    "decode_node": {"core", "text", "model", "kv_transfer", "runtime", "wires"},
    "colocated_node": OURS - {"colocated_node", "cluster", "tandem"},
    "cluster": OURS - {"cluster", "tandem"},
    "tandem": {"cluster", "core"},
}


def imports(path: Path) -> set[str]:
    """Dotted names of every module imported anywhere in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(*folders: str) -> list[Path]:
    return [p for f in folders for p in sorted((ROOT / f).rglob("*.py")) if "_pb2" not in p.name]


def test_there_is_something_to_check() -> None:
    for folder in OURS:
        assert len(files(folder)) > (folder not in ("tandem", "colocated_node")) * 2, folder


@pytest.mark.parametrize("folder", sorted(OURS))
def test_imports_point_down(folder: str) -> None:
    for path in files(folder):
        tops = {name.split(".")[0] for name in imports(path)} & OURS
        assert tops <= MAY_IMPORT[folder] | {folder}, f"{path} imports {tops}"


def test_ray_and_grpc_stay_in_their_rooms() -> None:
    for path in files(*OURS):
        found = imports(path)
        tops = {name.split(".")[0] for name in found}
        in_cluster = path.is_relative_to(ROOT / "cluster")
        assert "ray" not in tops or in_cluster, path
        has_doors = in_cluster and not path.is_relative_to(ROOT / "cluster/gateway")
        assert not tops & {"grpc", "grpc_health", "grpc_reflection"} or has_doors, path
        is_private = any(name.startswith(("ray._private", "ray._raylet")) for name in found)
        assert not is_private or path.name == "ray_private.py", path


def test_torch_distributed_only_where_a_group_is_owned() -> None:
    owners = {"wires/groups.py", "wires/nccl.py", "runtime/gang/collectives.py"}
    for path in files(*OURS):
        if any(name.startswith("torch.distributed") for name in imports(path)):
            assert str(path.relative_to(ROOT)) in owners, path


@pytest.mark.parametrize(
    ("banned", "modules"),
    [
        (("torch", "ray", "grpc"), ("core.schema", "cluster.gateway.gateway")),
        (("torch", "ray", "grpc", "google.protobuf"), ("cluster.gateway.admission",)),
        (
            ("torch", "ray"),
            (
                *("kv_transfer.pages", "prefill_node.scheduler", "decode_node.planning.scheduler"),
                *("decode_node.planning.step_planner", "tandem", "core.config", "runtime.shell"),
            ),
        ),
        (("torch",), ("text.tokenizer", "text.think", "cluster.control.controller")),
        (
            ("ray", "grpc", "torch._dynamo", "triton"),
            ("prefill_node.engine", "decode_node.engine"),
        ),
    ],
    ids=", ".join,
)
def test_light_modules_stay_light(banned: tuple[str, ...], modules: tuple[str, ...]) -> None:
    """In one process, one after the other: the first that is not light is named."""
    code = f"""
import sys
from importlib import import_module
for module in {modules!r}:
    import_module(module)
    if found := [name for name in {banned!r} if name in sys.modules]:
        sys.exit(f"{{module}} imports {{found}}")
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
