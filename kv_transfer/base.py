"""What a channel is: two ends, one transfer at a time, destroyed at the first error."""

import queue
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from core.errors import HandoverError
from kv_transfer.staging import Fence

Direction = Literal["send", "recv"]


def pending() -> "Future[None]":
    """A future that its waiters cannot cancel: the worker alone resolves it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True)
class Transfer:
    """``launched`` resolves when the transfer is posted, ``done`` when its tensor is free."""

    direction: Direction
    tensor: Tensor
    transfer_id: int
    after: Fence | None
    launched: "Future[None]" = field(default_factory=pending)
    done: "Future[None]" = field(default_factory=pending)

    def fail(self, error: Exception) -> None:
        for future in (self.launched, self.done):
            if not future.done():
                future.set_exception(error)


class Channel(ABC):
    """Transfers run in order on the channel's own thread, each within ``timeout_s``.

    Both ends number their transfers alike. After any error, `abort` or `close` nothing more
    is accepted; ``terminal`` resolves once no memory given to the channel can be touched.
    """

    def __init__(self, name: str, backend: str, timeout_s: float) -> None:
        self.name = name
        self.backend = backend
        self.timeout_s = timeout_s
        self.num_transfers = 0
        self.terminal = pending()
        self.failure: Exception | None = None
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"channel-{name}", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        return self.failure is None

    def send(self, tensor: Tensor, after: Fence | None = None) -> Transfer:
        """Send a tensor once ``after`` has passed. Never blocks; errors arrive in ``done``."""
        return self._enqueue("send", tensor, after)

    def recv(self, tensor: Tensor) -> Transfer:
        """Receive into a contiguous tensor of the size sent. Never blocks."""
        return self._enqueue("recv", tensor, None)

    def abort(self, reason: str = "aborted") -> None:
        """Refuse new transfers and end the running one as soon as the backend can."""
        if self._fail(HandoverError(f"channel {self.name}: {reason}")):
            self._interrupt()

    def _enqueue(self, direction: Direction, tensor: Tensor, after: Fence | None) -> Transfer:
        with self._lock:
            transfer = Transfer(direction, tensor, self.num_transfers, after)
            if self.failure is not None:
                transfer.fail(self.failure)
                return transfer
            self.num_transfers += 1
            self._queue.put(transfer)
        return transfer

    def _fail(self, error: Exception) -> bool:
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = error
            self._queue.put(None)
            return True

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            if self.failure is not None:
                transfer.fail(self.failure)
                continue
            try:
                self._transfer(transfer)
            except Exception as error:
                what = f"{transfer.direction} {transfer.transfer_id} of {transfer.tensor.nbytes} B"
                self._fail(HandoverError(f"channel {self.name}: {what} failed: {error}"))
                assert self.failure is not None
                transfer.fail(self.failure)
            else:
                transfer.done.set_result(None)
        self._destroy()
        self.terminal.set_result(None)

    @abstractmethod
    def _transfer(self, transfer: Transfer) -> None:
        """Post it, resolve ``launched``, block until done; raise on failure or deadline."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Make a running transfer fail soon, from any thread."""

    @abstractmethod
    def _destroy(self) -> None:
        """Free what the backend holds; afterwards it touches no memory of ours."""


class ChannelMaker(Protocol):
    """Makes the two ends of channels of one backend. ``accept`` and ``connect`` block."""

    backend: str
    device: str
    """Where staging must lie for this backend."""
    timeout_s: float

    def listen(self) -> str:
        """P: the address that D is told; the same for all channels."""
        ...

    def accept(self, nonce: str, peer: str) -> Channel:
        """P: rank 0's end, warm. Raises HandoverError when D does not come in time."""
        ...

    def connect(self, address: str, nonce: str, peer: str) -> Channel:
        """D: rank 1's end, warm. Raises HandoverError when P does not come in time."""
        ...
