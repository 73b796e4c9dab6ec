"""The wheel serves by itself: installed into an environment of its own, away from the tree."""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from benchmarks.driven.exact import near_ties
from benchmarks.driven.procs import ROOT, serving
from core.config import TINY_MODEL

pytestmark = pytest.mark.slow
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
IDS = [0, 40, 41]


def installed(folder: Path) -> Path:
    """An environment with the wheel of this tree; only what it depends on is shared."""
    tree = folder / "tree"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    options = ("-q", "--no-deps")
    wheels = folder / "wheels"
    subprocess.run(
        [*PIP, "wheel", *options, "--no-build-isolation", "-w", str(wheels), str(tree)], check=True
    )
    home = folder / "venv"
    venv.create(home)
    python = home / "bin" / "python"
    [wheel] = wheels.iterdir()
    subprocess.run([*PIP, "--python", str(python), "install", *options, str(wheel)], check=True)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


@pytest.mark.timeout(600)
def test_a_wheel_serves_away_from_the_tree(tmp_path: Path) -> None:
    bare = ("env", "-u", "PYTHONPATH")
    tools = installed(tmp_path) / "bin"

    def ran(*command: str | Path) -> str:
        return subprocess.run(
            [*bare, *map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    found = ran(tools / "python", "-c", "import cluster, tandem; print(tandem.__file__)")
    assert found.startswith(str(tools.parent))
    command = (*bare, str(tools / "tandem"))
    with serving("kv.num_pages=200", command=command, cwd=tmp_path) as running:
        ids = ",".join(map(str, IDS))
        args = ("--token-ids", ids, "--max-tokens", "8", "--json", "--address", running.address)
        answer = json.loads(ran(tools / "tandem", "generate", *args).splitlines()[-1])
        assert running.stop() == 0
    assert not near_ties(TINY_MODEL, IDS, answer["token_ids"])
