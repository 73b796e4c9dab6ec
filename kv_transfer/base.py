"""What a channel is: two ends, transfers in order, destroyed at the first error."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from tandem.core.errors import HandoverError
from tandem.core.tasks import uncancellable_future

Direction = Literal["send", "recv"]
log = logging.getLogger(__name__)


class Transport(Protocol):
    """One end of a connection of two ranks. One thread posts transfers, several at a time, another
    waits for them in order and destroys it once nothing more is posted; any may `abort`."""

    def post(self, direction: Direction, tensor: Tensor, transfer_id: int) -> Any:
        """Start a transfer; what is returned is for `wait`. Raises where it cannot start."""

    def wait(self, posted: Any, timeout_s: float) -> None:
        """Block the host until the transfer's tensor is free; raise on failure or deadline."""

    def abort(self) -> None:
        """Have a running transfer fail as soon as the backend can. May block, may raise."""

    def destroy(self) -> None:
        """Free what the backend holds. Returns or raises only when no posted transfer can touch
        its tensor any more; may block until then."""


@dataclass(slots=True, eq=False)
class Transfer:
    """``done`` resolves when its tensor is free; where that fails, the tensor is free once the
    channel is terminal."""

    direction: Direction
    tensor: Tensor
    transfer_id: int
    done: "Future[None]" = field(default_factory=uncancellable_future)

    @property
    def description(self) -> str:
        return f"{self.direction} {self.transfer_id} of {self.tensor.nbytes} B"


class Channel:
    """Transfers run in order, each within ``timeout_s`` of the end of the one before it. They are
    posted as they come, so that what is on its way hides how the next begins.

    Takes ownership of ``wire``. Both ends number their transfers alike; ``asked`` are the latest
    chunks that D has asked for, by numbers of their own, for some come to nothing. After any error
    or `abort` nothing more is accepted and what was fails at once. ``terminal`` resolves once no
    memory given to the channel can be touched: when the wire is destroyed, also when that raised. A
    backend that hangs in it keeps the memory: that is logged, and nothing else can be done about it
    but ending the process.
    """

    def __init__(self, transport: Transport, name: str, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.num_transfers, self.requested_chunks = 0, deque(range(-64, 0), maxlen=64)
        self.terminal = uncancellable_future()
        self.failure: Exception | None = None
        self._transport = transport
        self._running: list[Transfer] = []
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._posted: queue.SimpleQueue[tuple[Transfer, Any] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        for run in (self._post, self._wait):
            threading.Thread(target=run, name=f"channel-{name}", daemon=True).start()

    def send(self, tensor: Tensor) -> Transfer:
        """Send a tensor that is ready to be read. Never blocks; errors arrive in ``done``."""
        return self._enqueue("send", tensor)

    def recv(self, tensor: Tensor) -> Transfer:
        """Receive into a contiguous tensor of the size sent. Never blocks."""
        return self._enqueue("recv", tensor)

    def abort(self, reason: str = "aborted") -> None:
        """Refuse new transfers and end the running ones as soon as the backend can. Never
        blocks."""
        self._fail(HandoverError(f"channel {self.name}: {reason}"))

    def _enqueue(self, direction: Direction, tensor: Tensor) -> Transfer:
        with self._lock:
            transfer = Transfer(direction, tensor, self.num_transfers)
            if self.failure is not None:
                transfer.done.set_exception(self.failure)
                return transfer
            self.num_transfers += 1
            self._running.append(transfer)
            self._queue.put(transfer)
        return transfer

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            self._queue.put(None)
            for transfer in (failed := list(self._running)):
                transfer.done.set_exception(error)
        if failed:
            name = f"channel-abort-{self.name}"
            threading.Thread(target=self._interrupt, name=name, daemon=True).start()
        self._log_late_end()

    def _interrupt(self) -> None:
        try:
            self._transport.abort()
        except Exception:
            log.exception("channel %s: abort failed", self.name)

    def _log_late_end(self) -> None:
        # A wire without an abort ends at its own deadline; twice that is no longer slow.
        late_s = 2 * self.timeout_s
        text = "channel %s has not ended %s s after %s: its staging stays in quarantine"
        watch = threading.Timer(late_s, log.error, (text, self.name, late_s, self.failure))
        watch.name, watch.daemon = f"channel-end-{self.name}", True
        watch.start()
        self.terminal.add_done_callback(lambda _: watch.cancel())

    def _post(self) -> None:
        while (transfer := self._queue.get()) is not None:
            arguments = transfer.direction, transfer.tensor, transfer.transfer_id
            self._posted.put((transfer, self._attempt(transfer, self._transport.post, *arguments)))
        self._posted.put(None)

    def _wait(self) -> None:
        while (posted := self._posted.get()) is not None:
            self._wait_for(*posted)
        try:
            self._transport.destroy()
        except BaseException:
            log.exception("channel %s was not destroyed as it should be", self.name)
        finally:
            self.terminal.set_result(None)

    def _wait_for(self, transfer: Transfer, posted: Any) -> None:
        self._attempt(transfer, self._transport.wait, posted, self.timeout_s)
        with self._lock:
            self._running.remove(transfer)
            if self.failure is None:
                transfer.done.set_result(None)

    def _attempt(self, transfer: Transfer, work: Callable[..., Any], *args: Any) -> Any:
        """What it gives. What it raises ends the channel, of which only ``terminal`` says then
        when memory is free."""
        try:
            return work(*args) if self.failure is None else None
        except BaseException as error:
            text = f"channel {self.name}: {transfer.description} failed: {error}"
            self._fail(HandoverError(text))
