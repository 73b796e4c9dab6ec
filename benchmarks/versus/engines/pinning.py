"""The cores that a process runs on; standard library only."""

import os
from contextlib import suppress
from pathlib import Path


def sides(cores: list[int]) -> tuple[list[int], list[int]]:
    """Return the cores of prefill, where the client runs as well, and those of decode."""
    half = max(1, len(cores) // 2)
    return cores[:half], cores[half:] or cores[:half]


def pin(pid: int, cores: list[int]) -> None:
    """Pin all current threads of the process, and thereby all threads that these start later."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
