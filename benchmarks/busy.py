"""Processes that keep cores busy beside what is measured: standard library only, as engines of
other environments have them too."""

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
    """Run a process for each of ``commands``, which have begun once they print a line, and kill
    them in the end."""
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
