"""Which cores a process runs on; standard library only."""

import os
from contextlib import suppress
from pathlib import Path


def sides(cores: list[int]) -> tuple[list[int], list[int]]:
    """The cores of the prefill side, where the client runs as well, and of the decode side."""
    half = max(1, len(cores) // 2)
    return cores[:half], cores[half:] or cores[:half]


def pin(pid: int, cores: list[int]) -> None:
    """Every thread that the process has now, and whatever these start later."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
