"""Imports only point down the layers of docs/structure.md, and optional parts are imported
lazily."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tandem

ROOT = Path(__file__).parents[2]
PACKAGE = "tandem"
EDGE = "src/tandem"
OURS = {
    "core",
    "text",
    "model",
    "kv_transfer",
    "net",
    "runtime",
    "prefill_node",
    "decode_node",
    "colocated_node",
    "cluster",
    EDGE,
}
MAY_IMPORT = {
    "core": set(),
    "text": {"core"},
    "model": {"core", "text"},
    "net": {"core"},
    "kv_transfer": {"core", "net"},
    "runtime": {"core", "model", "kv_transfer", "net"},
    "prefill_node": {"core", "model", "kv_transfer", "runtime", "net"},
    "decode_node": {"core", "text", "model", "kv_transfer", "runtime", "net"},
    "colocated_node": OURS - {"colocated_node", "cluster", EDGE},
    "cluster": OURS - {"cluster", EDGE},
    EDGE: {"cluster", "core"},
}


def imports(path: Path) -> set[str]:
    """Return the dotted names of all modules imported anywhere in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def folders_imported(path: Path) -> set[str]:
    """Return the folders of OURS that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith(f"{PACKAGE}.")} & OURS


def files(*folders: str) -> list[Path]:
    return [p for f in folders for p in sorted((ROOT / f).rglob("*.py")) if "_pb2" not in p.name]


def test_there_is_something_to_check() -> None:
    for folder in OURS:
        assert len(files(folder)) > (folder not in (EDGE, "colocated_node")) * 2, folder


@pytest.mark.parametrize("folder", sorted(OURS))
def test_imports_point_down(folder: str) -> None:
    for path in files(folder):
        found = folders_imported(path)
        assert found <= MAY_IMPORT[folder] | {folder}, f"{path} imports {found}"


def test_every_folder_is_imported_by_another() -> None:
    """Guards the search for imports: if it found nothing, the tests below would forbid nothing."""
    for folder in OURS - {"cluster", "colocated_node", EDGE}:
        others = files(*OURS - {folder})
        assert any(folder in folders_imported(path) for path in others), folder


def test_the_package_is_named_in_every_import() -> None:
    """A user's own core/ or model/ in the working directory must not be imported instead."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    sources = [ROOT / name for name in listed if (ROOT / name).is_file()]
    assert len(sources) > 500
    for path in sources:
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & OURS, f"{path} imports {tops & OURS} without {PACKAGE}"


def test_every_name_of_the_package_is_its_own() -> None:
    """Names are imported when first used, and listed where type checkers look."""
    for name in tandem.__all__:
        assert getattr(tandem, name).__name__ == name
    assert set(tandem.__all__) <= set(dir(tandem))
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        tandem.Clinet  # noqa: B018


def test_links_of_the_package_are_relative_and_lead_somewhere() -> None:
    links = [path for path in (ROOT / EDGE).iterdir() if path.is_symlink()]
    assert {path.name for path in links} == (OURS - {EDGE}) | {"tiny-v3"}
    for path in links:
        assert not path.readlink().is_absolute() and path.is_dir(), path


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
    owners = {"net/groups.py", "net/nccl.py", "runtime/gang/collectives.py"}
    for path in files(*OURS):
        if any(name.startswith("torch.distributed") for name in imports(path)):
            assert str(path.relative_to(ROOT)) in owners, path


@pytest.mark.parametrize(
    ("banned", "modules"),
    [
        (("torch", "ray", "grpc"), ("tandem.core.schema", "tandem.cluster.gateway.gateway")),
        (("torch", "ray", "grpc", "google.protobuf"), ("tandem.cluster.gateway.admission",)),
        (
            ("torch", "ray"),
            (
                *(
                    "tandem.kv_transfer.pages",
                    "tandem.prefill_node.scheduler",
                    "tandem.decode_node.planning.scheduler",
                ),
                *(
                    "tandem.decode_node.planning.step_planner",
                    "tandem.cluster.client.client",
                    "tandem.core.config",
                    "tandem.runtime.rank_actor",
                ),
            ),
        ),
        (
            ("torch",),
            ("tandem.text.tokenizer", "tandem.text.think", "tandem.cluster.control.controller"),
        ),
        (
            ("ray", "grpc", "torch._dynamo", "triton"),
            ("tandem.prefill_node.engine", "tandem.decode_node.engine"),
        ),
    ],
    ids=", ".join,
)
def test_light_modules_stay_light(banned: tuple[str, ...], modules: tuple[str, ...]) -> None:
    """Import the modules in one process, one after another, and name the first that is not
    light."""
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
