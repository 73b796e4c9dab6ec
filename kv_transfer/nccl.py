"""NCCL transport between two GPUs. It enforces all timeouts itself, without torch's watchdogs."""

import threading
import time
from typing import Any

import torch
from torch import Tensor

from tandem.kv_transfer.base import Direction, Transport
from tandem.net.groups import Store
from tandem.net.nccl import configure_nccl, nccl_group

EVENT_POLL_S = 0.0005
SETTLE_S = 1.0
"""Maximum seconds between the completion of a transfer and its CUDA event. If the event takes
longer, the transfer counts as failed."""


class NcclBackend:
    """Creates NCCL transports, whose sockets are bound to the interface of ``host``."""

    name = "nccl"
    device = "cuda"

    def __init__(self, host: str) -> None:
        configure_nccl(host)

    def join(self, store: Store, rank: int) -> Transport:
        """Create this end as ``rank`` 0 or 1. The first transfer creates the communicator."""
        return NcclTransport(nccl_group(store, rank, 2, max_ctas=4), rank, self.device)


class NcclTransport:
    """One end of an NCCL connection. Its stream never waits for the engine's work."""

    def __init__(self, group: Any, rank: int, device: str) -> None:
        self._group: Any = group
        self._peer_rank = 1 - rank
        # torch reuses 32 pooled streams per priority. Steps and graphs use another priority, so
        # that they never share this stream.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Event | None = None
        self._aborting = threading.Event()
        self._lock = threading.Lock()

    def post(self, direction: Direction, tensor: Tensor, transfer_id: int) -> Any:
        """Enqueue a transfer.

        NCCL ignores ``transfer_id``, because it has no tags. Control calls keep the order of
        transfers the same at both ends.
        """
        operation = self._group.send if direction == "send" else self._group.recv
        with torch.cuda.stream(self._stream):
            work = operation([tensor], self._peer_rank, transfer_id)
            # This makes the stream wait, not the host, so that the event follows the transfer.
            work.wait()
            passed = self._last = torch.cuda.Event()
            passed.record(self._stream)
        return work, passed

    def wait(self, posted: Any, timeout_s: float) -> None:
        work, passed = posted
        ends_at = time.monotonic() + timeout_s
        is_over = False
        while not passed.query():
            if not is_over and work.is_completed():
                is_over = True
                ends_at = min(ends_at, time.monotonic() + SETTLE_S)
            if self._aborting.is_set() or time.monotonic() > ends_at:
                raise _reason(work, is_over, timeout_s)
            time.sleep(EVENT_POLL_S)
        if self._aborting.is_set():  # the event of an aborted kernel passes too
            raise ConnectionAbortedError("aborted")

    def abort(self) -> None:
        """Abort the group. ``destroy`` repeats this for a communicator created during an abort."""
        self._aborting.set()
        with self._lock:
            if self._group is not None:
                self._group.abort()

    def destroy(self) -> None:
        """Abort the group and wait for the last event, even if the abort fails.

        Only the event proves that no kernel accesses memory any more.
        """
        try:
            self.abort()
        finally:
            while self._last is not None and not self._last.query():
                time.sleep(EVENT_POLL_S)
            with self._lock:
                self._group = None


def _reason(work: Any, is_over: bool, timeout_s: float) -> Exception:
    if not is_over:
        return TimeoutError(f"the transfer was not done within {timeout_s} s")
    try:
        work.wait()  # does not block, raises the communicator's error
    except Exception as error:
        return error
    return ConnectionError("the transfer has ended, but its CUDA event did not occur in time")
