"""Memory allocator settings of CPU ranks."""

import ctypes
import logging

log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MALLOC_OPTIONS = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 30, _M_ARENA_MAX: 1}
"""Values for mallopt: reuse blocks up to 32 MiB, keep up to 1 GiB of freed memory, use one arena
for all threads."""


def keep_freed_memory() -> None:
    """Make malloc reuse large freed blocks instead of returning them to the system.

    A forward pass frees and reallocates activations thousands of times a second. The page faults
    of fresh memory would take half of a decode step. Does nothing without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in _MALLOC_OPTIONS.items():
        if not mallopt(option, value):
            log.info("mallopt refused option %d=%d", option, value)
