"""Channels between two ranks: ordered streams of tensor transfers, ended by the first error."""

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
    """One end of a connection between two ranks. Each backend implements this interface.

    One thread posts transfers, of which several may be pending. A second thread waits for them in
    order and destroys the transport after the last one. Any thread may call ``abort``.
    """

    def post(self, direction: Direction, tensor: Tensor, transfer_id: int) -> Any:
        """Start a transfer and return a handle for ``wait``. Raises if it cannot start."""

    def wait(self, posted: Any, timeout_s: float) -> None:
        """Block until the transfer no longer uses its tensor. Raises on failure or timeout."""

    def abort(self) -> None:
        """Make running transfers fail as soon as the backend can. May block, may raise."""

    def destroy(self) -> None:
        """Release the backend's resources.

        Blocks until no posted transfer can access its tensor any more, even if it raises after
        that.
        """


@dataclass(slots=True, eq=False)
class Transfer:
    """One tensor sent or received over a channel.

    ``done`` succeeds when the transfer no longer uses its tensor. If ``done`` fails, the tensor
    may be in use until the channel's ``terminal`` resolves.
    """

    direction: Direction
    tensor: Tensor
    transfer_id: int
    done: "Future[None]" = field(default_factory=uncancellable_future)

    @property
    def description(self) -> str:
        return f"{self.direction} of {self.tensor.nbytes} B (transfer {self.transfer_id})"


class Channel:
    """An ordered stream of tensor transfers over a transport, which the channel owns.

    Both ends number their transfers in the same order. A transfer is posted without waiting for
    earlier ones, so that its startup overlaps with them. After an error or ``abort``, pending
    transfers fail at once and new ones are refused.

    If the backend hangs while it is destroyed, ``terminal`` never resolves. The hang is logged. The
    memory of the transfers then stays in use until the process ends.

    Attributes:
        timeout_s: Maximum time of a transfer, measured from the end of the previous one.
        num_transfers: Number of transfers so far, which is the id of the next one.
        requested_chunks: Numbers of the latest 64 chunk requests (messages.Send). They differ from
            transfer ids, because some requests fail before a transfer.
        terminal: Resolves when no memory given to the channel can be accessed any more: after the
            transport was destroyed, with or without an error.
        failure: The first error, None while the channel is usable.
    """

    def __init__(self, transport: Transport, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.num_transfers = 0
        self.requested_chunks = deque(range(-64, 0), maxlen=64)
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
        """Queue the sending of a tensor that is ready to be read.

        Never blocks; errors are set on ``done``.
        """
        return self._enqueue("send", tensor)

    def recv(self, tensor: Tensor) -> Transfer:
        """Queue receiving into a contiguous tensor of the size sent. Never blocks."""
        return self._enqueue("recv", tensor)

    def abort(self, reason: str = "aborted") -> None:
        """Refuse new transfers and end running ones as soon as the backend can. Never blocks."""
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
        # A transport that cannot be aborted ends after its own timeout. Twice that time is a hang.
        late_s = 2 * self.timeout_s
        text = (
            "channel %s has not ended %s s after its failure (%s): its buffers stay in quarantine"
        )
        watch = threading.Timer(late_s, log.error, (text, self.name, late_s, self.failure))
        watch.name = f"channel-end-{self.name}"
        watch.daemon = True
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
            log.exception("channel %s could not be destroyed", self.name)
        finally:
            self.terminal.set_result(None)

    def _wait_for(self, transfer: Transfer, posted: Any) -> None:
        self._attempt(transfer, self._transport.wait, posted, self.timeout_s)
        with self._lock:
            self._running.remove(transfer)
            if self.failure is None:
                transfer.done.set_result(None)

    def _attempt(self, transfer: Transfer, work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``work``, None if the channel has failed or ``work`` raises.

        An exception ends the channel. After that, only ``terminal`` shows when the memory of
        transfers is no longer in use.
        """
        try:
            return work(*args) if self.failure is None else None
        except BaseException as error:
            text = f"channel {self.name}: {transfer.description} failed: {error}"
            self._fail(HandoverError(text))
