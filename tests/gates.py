"""Hold a cluster's engines in the middle of their work, so that a test decides what happens
next."""

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack

from tandem.core.control import Control
from tandem.core.tasks import Tasks
from tandem.decode_node.service.rank import DecodeRank
from tandem.prefill_node.rank import PrefillRank
from tests.rig import Rig


class Gate:
    """Holds an engine: it makes only the steps that are given, until ``open`` is called."""

    def __init__(self, rank: PrefillRank | DecodeRank) -> None:
        self.num_given = 0
        self._rank = rank
        self._step = rank.engine.step
        self._changed = threading.Condition()
        self._is_open = self._is_waiting = False
        self._num_left = 0
        rank.engine.step = self._held_step  # type: ignore[method-assign]

    def _held_step(self) -> None:
        with self._changed:
            self._is_waiting = True
            self._changed.wait_for(lambda: self._num_left or self._is_open)
            self._is_waiting = False
            self._num_left = max(0, self._num_left - 1)
        self._step()

    @property
    def is_held(self) -> bool:
        """Whether a step waits to be given."""
        with self._changed:
            return self._is_waiting and not self._num_left and not self._is_open

    @property
    def is_asked(self) -> bool:
        """Whether a call waits for the held step to end."""
        return self.is_held and bool(self._rank.loop._posts)

    def answer(self) -> None:
        """Give a step if a call waits for the held one to end."""
        if self.is_asked:
            self.give()

    def give(self) -> None:
        with self._changed:
            self.num_given += 1
            self._num_left += 1
            self._changed.notify()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify()


def are_active(rank: DecodeRank, num: int) -> bool:
    """Whether exactly ``num`` sequences decode on the rank."""
    return len(rank.engine.scheduler.running) == num


def begin_together(rank: DecodeRank, num: int) -> None:
    """Hold the rank until ``num`` sequences can decode, so that all of them start in the same
    step."""
    has_work, begun = rank.engine.has_work, list[bool]()

    def has_all() -> bool:
        if not begun and are_active(rank, num):
            begun.append(True)
        return bool(begun) and has_work()

    rank.engine.has_work = has_all  # type: ignore[method-assign]


class Wire:
    """A node's control interface with Ray's behaviour: a call completes even if its caller is
    cancelled.

    Attributes:
        refused: Methods that failed, each with the kind of failure.
        ``told``: Number of calls by method.
    """

    def __init__(self, control: Control) -> None:
        self.refused: list[tuple[str, str]] = []
        self.told = Counter[str]()
        self._control = control
        self._tasks = Tasks()

    async def call(self, method: str, payload: bytes) -> bytes:
        self.told[method] += 1
        data = await self._tasks.run_detached(self._control.call(method, payload))
        name, fields = msgpack.unpackb(data)
        if name == "Failure":
            self.refused.append((method, fields["kind"]))
        return data


@asynccontextmanager
async def gated(cluster: Rig) -> AsyncIterator[tuple[Gate, Gate, Wire, Wire]]:
    """Gate the only prefill node and the only decode node of a cluster, and count their calls."""
    [prefill], [decode] = cluster.prefills, cluster.decodes
    [prefill_handle] = cluster.gateway.fleet.of_kind("prefill")
    [decode_handle] = cluster.gateway.fleet.of_kind("decode")
    wires = Wire(prefill_handle.control), Wire(decode_handle.control)
    prefill_handle.control, decode_handle.control = wires
    find_control = decode._find_control
    decode._find_control = lambda name, epoch: Wire(find_control(name, epoch))
    gates = Gate(prefill), Gate(decode)
    try:
        yield *gates, *wires
    finally:
        for gate in gates:
            gate.open()
