"""Connections between simulated processes, as asyncio transports.

Bytes arrive in order, late or never. When a process is killed its kernel closes its connections,
and bytes already written may still arrive. Connections of a lost machine, or across a cut, do not
end at all until the cut heals.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.loop import Process, SimLoop, here

LEAST_S, MOST_S = 0.0002, 0.003
FIRST_PORT = 20_000
AGAIN_S = 0.5
"""Pause between attempts to connect, in seconds."""


class _Socket:
    def __init__(self, host: str, port: int) -> None:
        self._name = host, port

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def setsockopt(self, *_: Any) -> None:
        pass


@dataclass(eq=False)
class Listener:
    net: "Net"
    protocol_factory: Callable[[], Any]
    host: str
    port: int
    process: Process

    @property
    def sockets(self) -> list[_Socket]:
        return [_Socket(self.host, self.port)]

    def close(self) -> None:
        self.net.listeners.pop((self.host, self.port), None)

    async def wait_closed(self) -> None:
        pass

    async def start_serving(self) -> None:
        pass


class Net:
    """The network of a cluster.

    ``is_cut(a, b)`` says whether traffic from process ``a`` to process ``b`` is blocked now, which
    may hold for one direction only. Blocked bytes arrive after ``heal``.
    """

    def __init__(self, loop: SimLoop, draw: random.Random) -> None:
        self.loop, self.draw = loop, draw
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.is_cut: Callable[[Process, Process], bool] = lambda a, b: False
        self.on_write: Callable[[Transport, bytes], None] = lambda end, data: None
        self._port = FIRST_PORT
        self._ends: list[Transport] = []

    def is_silent(self, a: Process, b: Process) -> bool:
        """Whether ``a`` gets neither an answer nor a refusal from ``b``."""
        return self.is_cut(a, b) or self.is_cut(b, a) or b.is_gone

    def latency_s(self) -> float:
        return self.draw.uniform(LEAST_S, MOST_S)

    def next_port(self) -> int:
        self._port += 1
        return self._port

    def listen(self, protocol_factory: Callable[[], Any], host: str, port: int) -> Listener:
        process = here()
        listener = Listener(self, protocol_factory, host, port or self.next_port(), process)
        self.listeners[host, listener.port] = listener
        process.closes.append(listener.close)
        return listener

    async def connect(self, protocol_factory: Callable[[], Any], host: str, port: int) -> Any:
        me = here()
        await asyncio.sleep(2 * self.latency_s())  # time: virtual
        listener = self.listeners.get((host, port))
        while listener is not None and self.is_silent(me, listener.process):
            await asyncio.sleep(AGAIN_S)  # time: virtual
        if listener is None or not listener.process.is_alive:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        mine, theirs = Transport(self, me, protocol_factory()), Transport(self, listener.process)
        mine.peer, theirs.peer = theirs, mine
        self._ends += [mine, theirs]
        listener.process.call(theirs.accept, listener.protocol_factory)
        mine.protocol.connection_made(mine)
        return mine, mine.protocol

    def reset(self, machines: set[str]) -> int:
        """Reset the connections between two machines, losing bytes in flight; return their
        number."""
        self._ends = [end for end in self._ends if not end.is_over]
        broken = [e for e in self._ends if {e.process.machine, e.peer.process.machine} == machines]
        for end in broken:
            end.process.call(end.reset)
        return len(broken)

    def heal(self) -> None:
        """Deliver bytes that were blocked by a cut."""
        for end in self._ends:
            end.flush()
        self._ends = [end for end in self._ends if not end.is_over]


@dataclass(eq=False)
class Transport(asyncio.Transport):
    """One end of a connection. ``sent`` has the bytes written that have not arrived yet."""

    net: Net
    process: Process
    protocol: Any = None
    peer: "Transport" = None  # type: ignore[assignment]
    is_over: bool = False
    sent: list[bytes] = field(default_factory=list)
    _is_closing: bool = False
    _unread: list[bytes] = field(default_factory=list)
    _is_paused: bool = False
    _due_at: float = 0.0

    def __post_init__(self) -> None:
        self._extra: dict[str, Any] = {}
        self.process.closes.append(self._die)

    def accept(self, protocol_factory: Callable[[], Any]) -> None:
        self.protocol = protocol_factory()
        self.protocol.connection_made(self)
        for data in self._unread:
            self.protocol.data_received(data)
        self._unread = []

    def write(self, data: Any) -> None:
        if not (self._is_closing or self.is_over):
            self.sent.append(bytes(data))
            self._schedule()
            self.net.on_write(self, self.sent[-1])

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.sent))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Socket("127.0.0.1", 1) if name == "socket" else default

    def is_closing(self) -> bool:
        return self._is_closing or self.is_over

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        unread, self._unread = self._unread, []
        for data in unread:
            self._take(data)

    def set_write_buffer_limits(self, high: Any = None, low: Any = None) -> None:
        pass

    def close(self) -> None:
        """Close after everything written has been sent."""
        if not self._is_closing:
            self._is_closing = True
            self._schedule()

    def abort(self) -> None:
        self._is_closing = True
        self.sent.clear()
        self._schedule()

    def reset(self) -> None:
        """Report a reset to this end's process."""
        self._lose(ConnectionResetError("reset"))

    def flush(self) -> None:
        if self.sent or self._is_closing:
            self._schedule()

    def _schedule(self) -> None:
        """Schedule one arrival of all bytes written by then, in order."""
        now = self.net.loop.time()
        self._due_at = max(self._due_at, now + self.net.latency_s())
        self.net.loop.call_at(self._due_at, self._deliver, context=self.peer.process.context)

    def _deliver(self) -> None:
        """Deliver bytes in the peer's process."""
        peer = self.peer
        if self.net.is_cut(self.process, peer.process) or peer.is_over:
            return
        sent, self.sent = self.sent, []
        for data in sent:
            peer._take(data)
        if self._is_closing:
            peer._lose(None)
            if self.process.is_alive:
                self.process.call(self._lose, None)

    def _take(self, data: bytes) -> None:
        if self._is_paused or self.protocol is None:
            self._unread.append(data)
        elif not self.is_over:
            self.protocol.data_received(data)

    def _lose(self, error: Exception | None) -> None:
        if self.is_over:
            return
        self.is_over = self._is_closing = True
        if self.protocol is not None:
            if error is None:
                self.protocol.eof_received()
            self.protocol.connection_lost(error)

    def _die(self) -> None:
        """Let the kernel of the killed process close the connection; part of the bytes still
        arrive."""
        if self.is_over:
            return
        self.sent = self.sent[: self.net.draw.randint(0, len(self.sent))]
        self._is_closing = True
        self._schedule()
