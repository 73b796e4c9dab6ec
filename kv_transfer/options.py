"""Sizes and deadlines of hand-overs, the same for both sides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """``staging_bytes`` are cut into chunks of ``chunk_bytes``, one transfer each.

    A long poll is answered within ``wait_s``; any call within ``call_timeout_s`` more. A pull
    fails once nothing new was computed for ``progress_timeout_s``.
    """

    lease_s: float = 30.0
    staging_bytes: int = 64 << 20
    chunk_bytes: int = 4 << 20
    wait_s: float = 5.0
    call_timeout_s: float = 10.0
    progress_timeout_s: float = 120.0
    pin: bool = False
