"""``make test`` runs both of its parts and fails if either does. The set-up takes torch from its
index for CPUs if that is reachable."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.mutants import ROOT

PYTHON = """#!/bin/sh
[ "$2" = tests.prose ] && exit "$PROSE"
echo "pytest $TRITON_INTERPRET" >> "$SAID"
[ -n "$TRITON_INTERPRET" ] && exit "$SECOND"
exit "$FIRST"
"""


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_both_runs_happen_and_are_told(tmp_path: Path, first: int, second: int) -> None:
    """The commands are stubs that only record their calls."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "ruff", "mypy", "hadolint"):
        (tmp_path / "bin" / name).write_text(PYTHON if name == "python" else "#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".ready").touch()
    said = tmp_path / "said"
    env = os.environ | {"SAID": str(said), "FIRST": str(first), "SECOND": str(second)}
    env.pop("TRITON_INTERPRET", None)
    command = ["make", "test", f"VENV={tmp_path}"]

    def make(prose: int) -> "subprocess.CompletedProcess[str]":
        own = env | {"PROSE": str(prose)}
        return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)

    assert make(prose=1).returncode and not said.exists(), "lint comes first"
    ran = make(prose=0)
    assert sorted(said.read_text().splitlines()) == ["pytest ", "pytest 1"]
    assert (ran.returncode == 0) == (first == second == 0), ran.stdout + ran.stderr
    told = f"exit codes: {first}, interpreted kernels: {second}"
    assert told in ran.stdout


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """Serve a folder during the block; afterwards the port is closed."""
    (folder / "torch").mkdir(parents=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="has a GPU: CUDA's is taken")
def test_torch_comes_from_its_index_for_cpus_where_that_can_be_reached(tmp_path: Path) -> None:
    said, bin_path = tmp_path / "said", tmp_path / "bin"
    bin_path.mkdir()
    for name, does in (("python", f'exec {sys.executable} "$@"'), ("pip", f'echo "$@" > {said}')):
        (bin_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (bin_path / name).chmod(0o755)

    def set_up(url: str) -> str:
        command = ["make", "-s", "torch-for-cpu", f"VENV={tmp_path}", f"TORCH_CPU_INDEX={url}"]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    with index(tmp_path / "served") as url:
        assert set_up(url) == ""
        assert said.read_text() == f"install -q torch==2.13.0 --index-url {url}\n"
    said.unlink()
    assert set_up(url) == f"{url} cannot be reached: torch comes from where pip finds it"
    assert set_up("") == "" and not said.exists()
