"""Three minutes of chaos with real processes (tests/chaos): every answer exact, none refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pods import CAN_RUN

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not CAN_RUN, reason="needs root and iproute2")
@pytest.mark.parametrize("layout", ["gangs", "lone ranks"])
def test_nothing_is_lost_in_chaos(layout: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "3", "--logs", str(tmp_path)]
    run = subprocess.run([*command, "--layout", layout], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-2000:]}"
