"""How a CPU rank's process keeps the memory it has used."""

import ctypes
import logging

log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_BLOCK = 32 << 20
_LARGEST_RESERVE = 1 << 30


def keep_freed_memory() -> None:
    """Let malloc reuse large blocks instead of giving them back to the system.

    A forward's activations are freed and taken again thousands of times a second; faulting
    them in anew each time was half of a decode step. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    wanted = (
        (_M_MMAP_THRESHOLD, _LARGEST_BLOCK),
        (_M_TRIM_THRESHOLD, _LARGEST_RESERVE),
        (_M_ARENA_MAX, 1),
    )
    for option, value in wanted:
        if not mallopt(option, value):
            log.info("malloc option %d=%d was not taken", option, value)
