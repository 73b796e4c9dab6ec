"""Processes that keep cores busy in parallel with a measurement.

Uses only the standard library, because engines in other environments import it too.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

BUSY = "print(flush=True)\nwhile True: pass"


@contextmanager
def busy(num: int) -> Iterator[None]:
    """Keep ``num`` processes computing."""
    with running([[sys.executable, "-S", "-c", BUSY]] * num):
        yield


@contextmanager
def running(commands: Iterable[Sequence[str]]) -> Iterator[None]:
    """Run a process for each of ``commands``, and kill all of them at the end of the block.

    A process counts as started once it has printed a line.
    """
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
