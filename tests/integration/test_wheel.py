"""The wheel serves by itself: installed into a separate environment, outside the tree."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from benchmarks.harness.procs import ROOT, serving
from tests.integration.test_working_directory import MADE, USED, ask

pytestmark = pytest.mark.slow
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def installed(folder: Path) -> Path:
    """Return an environment with the wheel of this tree. Only the wheel's dependencies are
    shared."""
    tree = folder / "tree"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
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


@pytest.mark.timeout(900)
def test_a_wheel_serves_in_any_folder(tmp_path: Path) -> None:
    bare = ("env", "-u", "PYTHONPATH")
    tools = installed(tmp_path) / "bin"
    command = (*bare, str(tools / "tandem"))
    for kind, make in MADE.items():
        folder = make(tmp_path / kind)
        found = subprocess.run(
            [*bare, tools / "python", "-c", USED],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert found.startswith(str(tools.parent))
        with serving("kv.num_pages=200", command=command, cwd=folder) as running:
            assert ask(command, folder, running.address) == 8
            assert running.stop() == 0


def test_all_files_of_a_wheel_lie_below_the_package(tmp_path: Path) -> None:
    site = installed(tmp_path) / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    record = next(site.glob("tandem_serve-*.dist-info")) / "RECORD"
    tops = {line.split("/")[0] for line in record.read_text().splitlines()}
    assert tops == {"tandem", record.parent.name, ".."}, "the script is the one file outside"
    assert (site / "tandem" / "tiny-v3" / "model.safetensors").is_file()
