"""A rank's end of its gang: proposes, is told the plan, learns of the end of the epoch."""

import math
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tandem.core.errors import EpochEnded, ProgramFailed
from tandem.core.membership import Meeting, RankSpec
from tandem.core.schema import pack, unpack
from tandem.net.framing import Inbox, framed, received, shut
from tandem.net.groups import store_client
from tandem.runtime.gang.collectives import CONNECT_S, Collectives, connect
from tandem.runtime.gang.hub import HELLO, Hub
from tandem.runtime.gang.told import MAX_BYTES, Proposed, Told, send
from tandem.runtime.lockstep import Decide, Key, Lockstep, Plan, Proposal
from tandem.runtime.watch import Watch

DATA_FACTOR = 3
"""A rank waits this many times the watchdog's bound for the others: who is late is ended before."""
TICK_S = 0.5
"""Between two looks whether the device is late."""


class Member(Lockstep):
    """The lockstep of one rank in one epoch: a Planner whose plans come from rank 0.

    Made by meeting the other ranks: blocks for as long as they take to come, at most twice
    CONNECT_S, and raises EpochEnded when they do not. ``hub`` is rank 0's, ``watch`` that of this
    rank's engine thread: how long it waits for the others in the next step follows from it.

    ``plan`` is called by the engine thread alone; a thread of its own reads what the planner says.
    Owns ``collectives`` and, on rank 0, the ``hub``; ``close`` ends all three, which every other
    rank sees as the end of the epoch.
    """

    collectives: Collectives

    def __init__(
        self, spec: RankSpec, meeting: Meeting, hub: Hub | None, device: torch.device, watch: Watch
    ) -> None:
        store = partial(store_client, meeting.host, meeting.store_port, CONNECT_S)
        self.collectives = connect(store, spec.rank, spec.num_ranks, device, spec.host)
        watch.place = lambda: self.collectives.place
        self._name, self._hub = spec.life, hub
        self._watch, self._clock = watch, watch.clock
        self._due_at = math.inf
        self._connection = _connect(meeting, spec.rank)
        self._key: Any = None
        self._on_asked: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._next = 1
        self._asked = 0
        self._told: dict[int, Told] = {}
        self._lost = ""
        self._reader = threading.Thread(target=self._read, name="lockstep", daemon=True)

    def planner(
        self,
        decide: Decide[Proposal, Key],
        schema: tuple[type[Proposal], type[Key]],
        on_asked: Callable[[], None],
    ) -> "Member":
        """Begin; see Lockstep."""
        self._on_asked, self._key = on_asked, schema[1]
        if self._hub is not None:
            self._hub.run(decide, schema[0])
        self._reader.start()
        return self

    @property
    def is_asked(self) -> bool:
        """A step is wanted by others, or the epoch is over, which the next plan tells."""
        return self._asked >= self._next or bool(self._lost)

    def plan(self, proposal: Any) -> Plan[Any]:
        """Raises EpochEnded when it is over, or when no plan comes."""
        step = self._next
        timeout_s = self._timeout_s()
        self.collectives.begin(step, timeout_s)
        self._send(Proposed(step, pack(proposal)))
        with self._changed:
            is_told = self._changed.wait_for(lambda: step in self._told or self._lost, timeout_s)
            if step not in self._told:
                late = f"no plan within {timeout_s:g} s"
                raise EpochEnded(f"{self._name}, step {step}: {self._lost if is_told else late}")
            key = self._told.pop(step).key
        self._next = step + 1
        return Plan(step, None if key is None else unpack(self._key, key))

    @contextmanager
    def program(self) -> Iterator[None]:
        """What all ranks compute together: an error in it ends the epoch."""
        try:
            yield
        except EpochEnded:
            raise
        except Exception as error:
            raise ProgramFailed(f"{self._name}: its part of a step failed: {error!r}") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A device's collectives know no timeout: here they are aborted after one."""
        self._due_at = self._clock() + self._timeout_s()
        try:
            yield
        except RuntimeError as error:
            if self.collectives.is_aborted:
                raise EpochEnded(f"{self._name}: {self._lost}") from error
            raise
        finally:
            self._due_at = math.inf
        if self.collectives.is_aborted:
            raise EpochEnded(f"{self._name}: {self._lost}")

    def close(self) -> None:
        """On the engine thread, or when it has ended."""
        shut(self._connection)
        if self._reader.ident is None:
            self._connection.close()
        if self._hub is not None:
            self._hub.close()
        self.collectives.close()

    def _timeout_s(self) -> float:
        return DATA_FACTOR * self._watch.bound_s

    def _send(self, message: Proposed) -> None:
        try:
            send(self._connection, message)
        except OSError as error:
            raise EpochEnded(f"{self._name}: the planner has gone: {error}") from None

    def _read(self) -> None:
        """Until the epoch is over."""
        inbox = Inbox(MAX_BYTES)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                while self._clock() < self._due_at:
                    if selector.select(TICK_S):
                        for frame in received(self._connection, inbox):
                            self._take(unpack(Told, frame))
            self._lose(f"{self.collectives.place} has not ended in time")
        except (OSError, ValueError) as error:
            self._lose(f"the planner has gone: {error}")
        finally:
            self._connection.close()

    def _take(self, told: Told) -> None:
        with self._changed:
            if told.is_asked:
                self._asked = told.step
            else:
                self._told[told.step] = told
            self._changed.notify_all()
        if told.is_asked:
            self._on_asked()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
        # First, for an abort returns when no graph holds its collectives any more.
        self._on_asked()
        self.collectives.abort()


def _connect(meeting: Meeting, rank: int) -> socket.socket:
    try:
        connection = socket.create_connection((meeting.host, meeting.port), CONNECT_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(framed(meeting.token + HELLO.pack(rank)))
    except OSError as error:
        raise EpochEnded(f"rank {rank} cannot reach the planner: {error}") from error
    return connection
