"""How a CPU rank's process keeps the memory it has used."""

import ctypes
import logging

log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MALLOC_OPTIONS = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 30, _M_ARENA_MAX: 1}
"""The largest block to reuse, the largest reserve to keep, and one arena for all threads."""


def keep_freed_memory() -> None:
    """Let malloc reuse large blocks instead of giving them back to the system.

    A forward's activations are freed and taken again thousands of times a second; faulting
    them in anew each time was half of a decode step. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in _MALLOC_OPTIONS.items():
        if not mallopt(option, value):
            log.info("malloc option %d=%d was not taken", option, value)
