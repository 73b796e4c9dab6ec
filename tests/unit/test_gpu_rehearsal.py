"""Run the GPU measurements that docs/gpu.md documents, at small sizes on a CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import SECTIONS
from tests.sizes import ROOT

TEXT = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    python -m (benchmarks\.gpu --sections \S+)$", TEXT, re.MULTILINE)
MOST_S = 8 * 60


def test_they_measure_everything_once() -> None:
    parts = [command.split()[-1].split(",") for command in COMMANDS]
    assert len(parts) == 2 and sorted(parts[0] + parts[1]) == sorted(SECTIONS)


@pytest.mark.slow
def test_a_rehearsal_is_whole(tmp_path: Path) -> None:
    """The second command continues with the measurements of the first."""
    for command in COMMANDS:
        asked = [sys.executable, "-m", *command.split(), "--rehearse", "--out", str(tmp_path)]
        subprocess.run(asked, cwd=ROOT, check=True, timeout=MOST_S)
