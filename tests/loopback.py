"""KV channels within one process, for tests: a transfer is a copy in memory."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tandem.core.errors import HandoverError
from tandem.kv_transfer.base import Channel, Direction


@dataclass
class _Offer:
    tensor: Tensor
    is_filled: bool = False


class _Way:
    """One direction. Everything, the copy included, happens under ``changed``."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.offered: deque[_Offer] = deque()
        self.is_cut = False

    def cut(self) -> None:
        with self.changed:
            self.is_cut = True
            self.offered.clear()
            self.changed.notify_all()

    def send(self, tensor: Tensor, timeout_s: float) -> None:
        with self.changed:
            self._wait(lambda: bool(self.offered), timeout_s)
            target = self.offered[0].tensor
            if target.nbytes != tensor.nbytes:
                raise ValueError(f"{tensor.nbytes} B to send, {target.nbytes} to receive")
            target.copy_(tensor.view(target.shape))
            self.offered.popleft().is_filled = True
            self.changed.notify_all()

    def offer(self, tensor: Tensor) -> _Offer:
        with self.changed:
            self.offered.append(offer := _Offer(tensor))
            self.changed.notify_all()
        return offer

    def filled(self, offer: _Offer, timeout_s: float) -> None:
        """Wait for the sender's copy. On failure the wire ends and drops what it was offered."""
        with self.changed:
            self._wait(lambda: offer.is_filled, timeout_s)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        if not self.changed.wait_for(lambda: condition() or self.is_cut, timeout_s):
            raise TimeoutError(f"the other end did not come within {timeout_s} s")
        if not condition():
            raise ConnectionError("the other end is gone")


class LoopbackWire:
    """One end of a channel. A receiver offers its tensor, and the sender copies into it."""

    def __init__(self, outgoing: _Way, incoming: _Way) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def post(self, direction: Direction, tensor: Tensor, transfer_id: int) -> Any:
        return tensor if direction == "send" else self._incoming.offer(tensor)

    def wait(self, posted: Any, timeout_s: float) -> None:
        if isinstance(posted, _Offer):
            self._incoming.filled(posted, timeout_s)
        else:
            self._outgoing.send(posted, timeout_s)

    def abort(self) -> None:
        self._outgoing.cut()
        self._incoming.cut()

    destroy = abort


class LoopbackChannels:
    """A factory for both ends of in-process channels, which are matched by nonce."""

    backend = "loopback"

    def __init__(self, timeout_s: float = 30.0, device: str = "cpu") -> None:
        self.timeout_s = timeout_s
        self.device = device
        self._waiting: dict[str, tuple[_Way, _Way]] = {}
        self._met = threading.Condition()

    def listen(self) -> str:
        return "loopback:0"

    def accept(self, nonce: str, peer: str) -> Channel:
        wires = (_Way(), _Way())
        with self._met:
            self._waiting[nonce] = wires
            self._met.notify_all()
            if not self._met.wait_for(lambda: nonce not in self._waiting, self.timeout_s):
                del self._waiting[nonce]
                raise HandoverError(f"channel loopback:{peer}: nobody connected")
        return _channel(wires[0], wires[1], peer, self.timeout_s)

    def connect(self, address: str, nonce: str, peer: str) -> Channel:
        with self._met:
            if not self._met.wait_for(lambda: nonce in self._waiting, self.timeout_s):
                raise HandoverError(f"channel loopback:{peer}: nobody accepts {nonce}")
            incoming, outgoing = self._waiting.pop(nonce)
            self._met.notify_all()
        return _channel(outgoing, incoming, peer, self.timeout_s)

    def close(self) -> None:
        assert not self._waiting, f"channels never met: {list(self._waiting)}"


def _channel(outgoing: _Way, incoming: _Way, peer: str, timeout_s: float) -> Channel:
    return Channel(LoopbackWire(outgoing, incoming), f"loopback:{peer}", timeout_s)
