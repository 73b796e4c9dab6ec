"""Channels inside one process: a hand-over whose wire is a copy in memory, for tests."""

import threading
from collections.abc import Callable

from core.errors import HandoverError
from kv_transfer.base import Channel, Transfer


class _Wire:
    """One direction. Everything, the copy included, happens under ``changed``."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.offered: Transfer | None = None
        self.is_cut = False

    def cut(self) -> None:
        with self.changed:
            self.is_cut = True
            self.changed.notify_all()

    def send(self, transfer: Transfer, timeout_s: float) -> None:
        with self.changed:
            self._wait(lambda: self.offered is not None, timeout_s)
            assert self.offered is not None
            target = self.offered.tensor
            if target.nbytes != transfer.tensor.nbytes:
                raise ValueError(f"{transfer.tensor.nbytes} B to send, {target.nbytes} to receive")
            target.copy_(transfer.tensor.view(target.shape))
            self.offered = None
            self.changed.notify_all()

    def recv(self, transfer: Transfer, timeout_s: float) -> None:
        with self.changed:
            self.offered = transfer
            self.changed.notify_all()
            transfer.launched.set_result(None)
            try:
                self._wait(lambda: self.offered is None, timeout_s)
            finally:
                self.offered = None

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        if not self.changed.wait_for(lambda: condition() or self.is_cut, timeout_s):
            raise TimeoutError(f"the other end did not come within {timeout_s} s")
        if not condition():
            raise ConnectionError("the other end is gone")


class LoopbackChannel(Channel):
    """One end; a receiver offers its tensor, the sender copies into it."""

    def __init__(self, outgoing: _Wire, incoming: _Wire, name: str, timeout_s: float) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        super().__init__(name, "loopback", timeout_s)

    def _transfer(self, transfer: Transfer) -> None:
        if transfer.after is not None:
            transfer.after()
        if transfer.direction == "recv":
            self._incoming.recv(transfer, self.timeout_s)
        else:
            transfer.launched.set_result(None)
            self._outgoing.send(transfer, self.timeout_s)

    def _interrupt(self) -> None:
        self._outgoing.cut()
        self._incoming.cut()

    def _destroy(self) -> None:
        self._interrupt()


class LoopbackChannels:
    """Both ends come from the same object; they meet by nonce."""

    backend = "loopback"

    def __init__(self, timeout_s: float = 30.0, device: str = "cpu") -> None:
        self.timeout_s = timeout_s
        self.device = device
        self._waiting: dict[str, tuple[_Wire, _Wire]] = {}
        self._met = threading.Condition()

    def listen(self) -> str:
        return "loopback:0"

    def accept(self, nonce: str, peer: str) -> Channel:
        wires = (_Wire(), _Wire())
        with self._met:
            self._waiting[nonce] = wires
            self._met.notify_all()
            if not self._met.wait_for(lambda: nonce not in self._waiting, self.timeout_s):
                del self._waiting[nonce]
                raise HandoverError(f"channel loopback:{peer}: nobody connected")
        return LoopbackChannel(wires[0], wires[1], f"loopback:{peer}", self.timeout_s)

    def connect(self, address: str, nonce: str, peer: str) -> Channel:
        with self._met:
            if not self._met.wait_for(lambda: nonce in self._waiting, self.timeout_s):
                raise HandoverError(f"channel loopback:{peer}: nobody accepts {nonce}")
            incoming, outgoing = self._waiting.pop(nonce)
            self._met.notify_all()
        return LoopbackChannel(outgoing, incoming, f"loopback:{peer}", self.timeout_s)

    def close(self) -> None:
        assert not self._waiting, f"channels never met: {list(self._waiting)}"
