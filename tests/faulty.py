"""A gloo backend in which every call can fail or hang, to imitate faults of NCCL."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tandem.kv_transfer.base import Channel, Direction, Transport
from tandem.kv_transfer.channel import ChannelFactory
from tandem.kv_transfer.gloo import GlooBackend
from tandem.net.groups import store_client

WARM = 2
"""Transfers that set a channel up. By default, faults of transfers start after them."""
ENDINGS = ("wait", "abort", "destroy")
"""Calls without which a transfer does not end."""


@dataclass
class Fault:
    """Makes one kind of call fail or hang, from transfer ``after`` on, until `over`.

    `over` releases calls that hang. Aborting the wire also releases posted work, as with NCCL.
    """

    call: str = ""
    hangs: bool = False
    after: int = WARM
    num_met: int = 0
    met_on: set[threading.Thread] = field(default_factory=set)
    let_go: threading.Event = field(default_factory=threading.Event)

    def meet(self, call: str, aborted: threading.Event | None = None) -> None:
        if call != self.call or self.let_go.is_set():
            return
        self.num_met += 1
        self.met_on.add(threading.current_thread())
        if not self.hangs:
            raise RuntimeError(f"{call} was made to fail")
        while not self.let_go.wait(0.01):  # time: between two looks at what aborts it
            if aborted is not None and aborted.is_set():
                raise ConnectionAbortedError(f"{call} was aborted")

    def over(self) -> None:
        self.let_go.set()


class FaultyBackend(GlooBackend):
    """The gloo backend with a configurable fault."""

    def __init__(self, host: str, timeout_s: float) -> None:
        super().__init__(host, timeout_s)
        self.fault = Fault()

    def join(self, store: dist.Store, rank: int) -> Transport:
        self.fault.meet("join")
        return FaultyWire(super().join(store, rank), self.fault)


class FaultyWire:
    def __init__(self, transport: Transport, fault: Fault) -> None:
        self._transport = transport
        self._fault = fault
        self._aborted = threading.Event()
        self._num_posted = 0

    def post(self, direction: Direction, tensor: Tensor, transfer_id: int) -> Any:
        self._num_posted += 1
        if self._num_posted > self._fault.after:
            self._fault.meet(direction)
        if self._is_stuck():
            return None
        return self._transport.post(direction, tensor, transfer_id)

    def _is_stuck(self) -> bool:
        """Whether posted work never starts because a transfer before it does not end."""
        fault = self._fault
        is_late = fault.call in ENDINGS and self._num_posted > max(fault.after, WARM) + 1
        return is_late and not fault.let_go.is_set()

    def wait(self, posted: Any, timeout_s: float) -> None:
        fault = self._fault
        if posted is None:
            raise RuntimeError("it has never begun")
        if self._num_posted > fault.after and not fault.let_go.is_set():
            fault.meet("wait", self._aborted)
            if fault.call == "abort":  # abort hangs only if there is a transfer to abort
                self._aborted.wait()
            if fault.call in ("abort", "destroy"):
                raise RuntimeError("the peer is gone")
        self._transport.wait(posted, timeout_s)

    def abort(self) -> None:
        self._aborted.set()
        self._fault.meet("abort")
        self._transport.abort()

    def destroy(self) -> None:
        try:
            self._fault.meet("destroy")
        finally:
            self._transport.destroy()


def watched(channel: Channel) -> list[Any]:
    """Return a list to which the channel's transfers are appended when it starts to wait for
    them."""
    begun: list[Any] = []
    wait = channel._transport.wait

    def told(posted: Any, timeout_s: float) -> None:
        begun.append(posted)
        wait(posted, timeout_s)

    channel._transport.wait = told  # type: ignore[method-assign]
    return begun


class FaultyChannels(ChannelFactory):
    """Channels with a fault. ``fault`` can be replaced at any time; the store's client can fail
    too."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.faulty = FaultyBackend(host, timeout_s)
        super().__init__(self.faulty, host, timeout_s)

    def _make(self, *given: Any, **more: Any) -> Channel:
        _opening.fault = self.faulty.fault
        return super()._make(*given, **more)


_opening = threading.local()
"""Per thread: the fault that the store's client meets while the thread makes a channel."""


def faulty_client(**options: Any) -> dist.Store:
    """Replace ``store_client`` of kv_transfer/channel.py by one that can fail."""
    _opening.fault.meet("store")
    return store_client(**options)
