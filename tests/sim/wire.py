"""The simulated backend of channels: two ends meet in a store by their nonce, and copy tensors.

Copies take time, and a cut in the middle of one breaks the connection.
"""

from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.sim.loop import Process, here
from tests.sim.net import Net
from tests.sim.threads import Threads, Waiter

BYTES_PER_S = 50e6
KERNEL = Context()
"""Context of no process."""


@dataclass(eq=False)
class Store:
    """Store of one prefill rank, where the ends of channels wait for each other."""

    host: str
    port: int
    process: Process
    waiting: dict[str, "Pipe"] = field(default_factory=dict)


@dataclass(eq=False)
class Half:
    process: Process
    posted: deque[tuple[int, str, Tensor, "Posted"]] = field(default_factory=deque)
    """Transfers not started yet: id, direction, tensor, and the waiter."""


@dataclass(eq=False)
class Pipe:
    halves: list[Half] = field(default_factory=list)
    is_closed: bool = False
    free_at: float = 0.0
    """Time when all started transfers will have arrived."""
    met: list[Waiter] = field(default_factory=list)


@dataclass(eq=False)
class Posted:
    is_done: bool = False
    failure: str = ""
    waiter: Waiter | None = None

    def end(self, failure: str = "") -> None:
        if not self.is_done:
            self.is_done, self.failure = True, failure
            if self.waiter is not None:
                self.waiter.wake()


class Wires:
    """All simulated channels. They replace torch's stores and gloo in ChannelFactory."""

    def __init__(self, net: Net, threads: Threads) -> None:
        self.net, self.threads = net, threads
        self.stores: dict[tuple[str, int], Store] = {}
        self.pipes: list[Pipe] = []
        self.extra_s: Callable[[], float] = lambda: 0.0
        self.most_extra_s = 0.0

    def store_server(self, host: str, timeout_s: float) -> tuple[Store, int]:
        store = Store(host, self.net.next_port(), here())
        self.stores[host, store.port] = store
        return store, store.port

    def store_client(self, host: str, port: int, timeout_s: float, prefix: str = "") -> Any:
        store = self.stores.get((host, port))
        self.threads.sleep(self.net.latency_s())  # time: virtual
        if store is None or not store.process.is_alive or self.net.is_silent(here(), store.process):
            raise RuntimeError(f"nobody answers at {host}:{port}")
        return store, prefix

    def backend(self, host: str, timeout_s: float) -> "Backend":
        return Backend(self, timeout_s)

    def reset(self, machines: set[str]) -> None:
        """Reset connections between two machines."""
        for pipe in [*self.pipes]:
            if {half.process.machine for half in pipe.halves} == machines:
                self.close(pipe)

    def close(self, pipe: Pipe, by: Process | None = None) -> None:
        """Fail all posted transfers; the other end fails a little later."""
        if pipe.is_closed:
            return
        pipe.is_closed = True
        self.pipes.remove(pipe)
        for half in pipe.halves:
            for *_, posted in half.posted if half.process is not by else ():
                half.process.call(posted.end, "the peer closed the connection", after_s=0.001)


@dataclass(eq=False)
class Backend:
    wires: Wires
    timeout_s: float
    name: str = "gloo"
    device: str = "cpu"

    def join(self, met: tuple[Store, str], rank: int) -> "Wire":
        store, nonce = met
        if nonce not in store.waiting:
            store.waiting[nonce] = Pipe()
            self.wires.pipes.append(store.waiting[nonce])
        pipe = store.waiting[nonce]
        half = Half(here())
        pipe.halves.append(half)
        half.process.closes.append(lambda: self.wires.close(pipe, half.process))
        if len(pipe.halves) == 1:
            waiter = Waiter(self.wires.threads)
            pipe.met.append(waiter)
            if not waiter.park(self.timeout_s):
                raise RuntimeError("the other end has not come")
        else:
            del store.waiting[nonce]
            first = pipe.halves[0]
            for waiter in pipe.met:
                first.process.call(waiter.wake, after_s=self.wires.net.latency_s())
        return Wire(self.wires, pipe, half)


@dataclass(eq=False)
class Wire:
    wires: Wires
    pipe: Pipe
    half: Half

    def post(self, direction: str, tensor: Tensor, transfer_id: int) -> Posted:
        if self.pipe.is_closed:
            raise RuntimeError("the peer closed the connection")
        self.half.posted.append((transfer_id, direction, tensor, posted := Posted()))
        if len(self.pipe.halves) == 2 and all(half.posted for half in self.pipe.halves):
            self._copy()
        return posted

    def _copy(self) -> None:
        """Copy a tensor in the kernels, so that neither process has to run.

        The first half is written at once, the second at the end, even if the memory has a new owner
        by then.
        """
        told = {half.posted[0][1]: half for half in self.pipe.halves}
        sender, receiver = told["send"], told["recv"]
        (number, _, source, sent), (other, _, target, came) = (
            half.posted.popleft() for half in (sender, receiver)
        )
        assert number == other, f"{number} is sent to who waits for {other}"
        if source.nbytes != target.nbytes:
            wrong = f"{source.nbytes} B sent to {target.nbytes}: gloo ends a process of too few"
            return self.wires.net.loop.call_exception_handler({"message": wrong})
        wires, pipe = self.wires, self.pipe
        began_at, latency_s = max(wires.net.loop.time(), pipe.free_at), wires.net.latency_s()
        pipe.free_at = began_at + source.nbytes / BYTES_PER_S + wires.extra_s()
        read, written = source.flatten(), target.view(-1)
        middle = len(read) // 2
        written[:middle] = read[:middle]

        def arrive() -> None:
            if pipe.is_closed or wires.net.is_cut(sender.process, receiver.process):
                wires.close(pipe, sender.process)
                for half, posted in ((sender, sent), (receiver, came)):
                    half.process.call(posted.end, "the connection broke")
                return
            written[middle:] = read[middle:]
            sender.process.call(sent.end)
            receiver.process.call(came.end)

        wires.net.loop.call_at(pipe.free_at + latency_s, arrive, context=KERNEL)

    def wait(self, posted: Posted, timeout_s: float) -> None:
        if not posted.is_done:
            posted.waiter = Waiter(self.wires.threads)
            if not posted.waiter.park(timeout_s):
                raise RuntimeError(f"not done within {timeout_s} s")
        if posted.failure:
            raise RuntimeError(posted.failure)

    def abort(self) -> None:
        """Do nothing, like gloo: a blocked wait ends at its deadline."""

    def destroy(self) -> None:
        self.wires.close(self.pipe, self.half.process)
