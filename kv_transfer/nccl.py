"""NCCL between two GPUs. Every deadline is ours: none of torch's watchdogs may act on a channel."""

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
"""From work that is said to be over to its event: longer, and it is over because it failed."""


class NcclBackend:
    """``host`` is the address whose interface NCCL's sockets are bound to."""

    name = "nccl"
    device = "cuda"

    def __init__(self, host: str) -> None:
        configure_nccl(host)

    def join(self, store: Store, rank: int) -> Transport:
        """One end of two; its communicator is created by the first transfer."""
        return NcclTransport(nccl_group(store, rank, 2, max_ctas=4), rank, self.device)


class NcclTransport:
    """Transfers are enqueued on a stream of their own, which waits for no engine's work."""

    def __init__(self, group: Any, rank: int, device: str) -> None:
        self._group: Any = group
        self._peer_rank = 1 - rank
        # torch hands out 32 of each priority, again and again: steps and graphs have others.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Event | None = None
        self._aborting = threading.Event()
        self._lock = threading.Lock()

    def post(self, direction: Direction, tensor: Tensor, transfer_id: int) -> Any:
        """NCCL has no tags: ``transfer_id`` is agreed by control calls alone."""
        operation = self._group.send if direction == "send" else self._group.recv
        with torch.cuda.stream(self._stream):
            work = operation([tensor], self._peer_rank, transfer_id)
            # Makes this stream wait, not the host: the event passes with the transfer.
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
        if self._aborting.is_set():  # an aborted kernel ends too, and its event passes
            raise ConnectionAbortedError("aborted")

    def abort(self) -> None:
        """May be repeated: a communicator that was being created meanwhile needs another."""
        self._aborting.set()
        with self._lock:
            if self._group is not None:
                self._group.abort()

    def destroy(self) -> None:
        """Only the event says that the kernel is gone: also a failed abort waits for it."""
        try:
            self.abort()
        finally:
            while self._last is not None and not self._last.query():
                time.sleep(EVENT_POLL_S)
            with self._lock:
                self._group = None


def _reason(work: Any, is_over: bool, timeout_s: float) -> Exception:
    if not is_over:
        return TimeoutError(f"not done within {timeout_s} s")
    try:
        work.wait()  # of what is over: raises the communicator's error
    except Exception as error:
        return error
    return ConnectionError("over, but its memory was not seen to be free")
