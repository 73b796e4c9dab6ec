"""Processes that keep cores busy beside what is measured: standard library only, as engines of
other environments have them too."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "print(flush=True)\nwhile True: pass"


@contextmanager
def busy(num: int) -> Iterator[None]:
    """So many processes that compute, and have begun to."""
    command = [sys.executable, "-S", "-c", BUSY]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(num)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
