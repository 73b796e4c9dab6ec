"""``make test`` runs both of its parts and fails if either does."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.mutants import ROOT

PYTHON = """#!/bin/sh
echo "pytest $TRITON_INTERPRET" >> "$SAID"
[ -n "$TRITON_INTERPRET" ] && exit "$SECOND"
exit "$FIRST"
"""


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_both_runs_happen_and_are_told(tmp_path: Path, first: int, second: int) -> None:
    """By commands that only say that they were called."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "ruff", "mypy"):
        (tmp_path / "bin" / name).write_text(PYTHON if name == "python" else "#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".ready").touch()
    said = tmp_path / "said"
    env = os.environ | {"SAID": str(said), "FIRST": str(first), "SECOND": str(second)}
    env.pop("TRITON_INTERPRET", None)
    command = ["make", "test", f"VENV={tmp_path}"]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert said.read_text().splitlines() == ["pytest ", "pytest 1"]
    assert (ran.returncode == 0) == (first == second == 0), ran.stdout + ran.stderr
    told = f"exit codes: {first}, interpreted kernels: {second}"
    assert told in ran.stdout
