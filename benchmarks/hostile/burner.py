"""Processes that burn a share of a core: standard library only."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.busy import running

BURN = """
import sys, time
share, began = float(sys.argv[1]), time.monotonic()
print(flush=True)
while True:
    while time.process_time() < share * (time.monotonic() - began):
        pass
    time.sleep(0.002)
"""


@contextmanager
def burning(*rates: float) -> Iterator[None]:
    """Burn CPU seconds per second at each of ``rates``; a rate above 1 uses several processes."""
    shares = [rate / math.ceil(rate) for rate in rates if rate > 0 for _ in range(math.ceil(rate))]
    with running([sys.executable, "-S", "-c", BURN, str(share)] for share in shares):
        yield
