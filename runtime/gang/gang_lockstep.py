"""A rank's client of its gang's planner: sends proposals and receives plans.

When its connection to the planner ends, the epoch is over.
"""

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
from tandem.core.membership import RankSpec, Rendezvous
from tandem.core.schema import pack, unpack
from tandem.net.framing import FrameDecoder, encode_frame, read_frames, shutdown_socket
from tandem.net.groups import store_client
from tandem.runtime.gang.collectives import CONNECT_S, Collectives, connect
from tandem.runtime.gang.planner_messages import (
    MAX_PLAN_MESSAGE_BYTES,
    PlanMessage,
    ProposalMessage,
    send,
)
from tandem.runtime.gang.planner_server import RANK_GREETING, PlannerServer
from tandem.runtime.lockstep import Decide, Key, Lockstep, Plan, Proposal
from tandem.runtime.stall_detector import StallDetector

DATA_FACTOR = 3
"""Maximum time that a rank waits for other ranks, as a multiple of the stall threshold. A rank that
has stalled is ended before that."""
TICK_S = 0.5
"""Seconds between two checks whether the device has exceeded its timeout."""


class GangLockstep(Lockstep):
    """Lockstep of one rank in one epoch. It is also the rank's Planner; its plans come from rank 0.

    The constructor connects to the other ranks and blocks until that is done. It raises EpochEnded
    if they do not connect in time (CONNECT_S). Only the engine thread calls ``plan``. A separate
    thread reads the planner's messages.

    Owns ``collectives`` and, on rank 0, ``planner_server``. ``close`` ends both, and the connection
    to the planner. All other ranks then see that the epoch is over.

    Args:
        spec: Parameters of the rank in this epoch.
        rendezvous: Addresses at which the ranks meet.
        planner_server: The planner on rank 0, None on other ranks.
        device: Device of the collectives.
        stall_detector: Detector of the engine thread; its threshold determines the timeout of each
            step.
    """

    collectives: Collectives

    def __init__(
        self,
        spec: RankSpec,
        rendezvous: Rendezvous,
        planner_server: PlannerServer | None,
        device: torch.device,
        stall_detector: StallDetector,
    ) -> None:
        store = partial(store_client, rendezvous.host, rendezvous.store_port, CONNECT_S)
        self.collectives = connect(
            store=store, rank=spec.rank, num_ranks=spec.num_ranks, device=device, host=spec.host
        )
        stall_detector.position = lambda: self.collectives.position
        self._name = spec.epoch_name
        self._planner_server = planner_server
        self._stall_detector = stall_detector
        self._clock = stall_detector.clock
        self._due_at = math.inf
        self._connection = _connect(rendezvous, spec.rank)
        self._key_type: Any = None
        self._on_step_requested: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._next_step = 1
        self._requested_step = 0
        self._plans: dict[int, PlanMessage] = {}
        self._end_reason = ""
        self._reader = threading.Thread(target=self._read, name="lockstep", daemon=True)

    def planner(
        self,
        decide: Decide[Proposal, Key],
        schema: tuple[type[Proposal], type[Key]],
        on_step_requested: Callable[[], None],
    ) -> "GangLockstep":
        """Start planning and return this object, which is the planner; see ``Lockstep.planner``."""
        self._on_step_requested = on_step_requested
        self._key_type = schema[1]
        if self._planner_server is not None:
            self._planner_server.start_planning(decide, schema[0])
        self._reader.start()
        return self

    @property
    def is_step_requested(self) -> bool:
        """Whether the engine must call ``plan``: other ranks want a step, or the epoch is over.

        If the epoch is over, ``plan`` raises EpochEnded.
        """
        return self._requested_step >= self._next_step or bool(self._end_reason)

    def plan(self, proposal: Any) -> Plan[Any]:
        """Send ``proposal`` and return the plan of the next step.

        Raises EpochEnded if the epoch is over or no plan arrives in time.
        """
        step = self._next_step
        timeout_s = self._timeout_s()
        self.collectives.start_step(step, timeout_s)
        self._send(ProposalMessage(step, pack(proposal)))
        with self._changed:
            has_plan_or_end = self._changed.wait_for(
                lambda: step in self._plans or self._end_reason, timeout_s
            )
            if step not in self._plans:
                late = f"the planner sent no plan within {timeout_s:g} s"
                raise EpochEnded(
                    f"{self._name}, step {step}: {self._end_reason if has_plan_or_end else late}"
                )
            key = self._plans.pop(step).key
        self._next_step = step + 1
        return Plan(step, None if key is None else unpack(self._key_type, key))

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        """Return a context for work that all ranks compute together. An error ends the epoch."""
        try:
            yield
        except EpochEnded:
            raise
        except Exception as error:
            raise ProgramFailed(
                f"{self._name}: this rank's part of a step failed: {error!r}"
            ) from error

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Return a context in which the host waits for the device.

        Collectives on a GPU have no timeout. If the wait takes too long, the reader thread
        therefore aborts them, and the context raises EpochEnded.
        """
        self._due_at = self._clock() + self._timeout_s()
        try:
            yield
        except RuntimeError as error:
            if self.collectives.is_aborted:
                raise EpochEnded(f"{self._name}: {self._end_reason}") from error
            raise
        finally:
            self._due_at = math.inf
        if self.collectives.is_aborted:
            raise EpochEnded(f"{self._name}: {self._end_reason}")

    def close(self) -> None:
        """End the epoch. Called on the engine thread, or after that thread has ended."""
        shutdown_socket(self._connection)
        if self._reader.ident is None:
            self._connection.close()
        if self._planner_server is not None:
            self._planner_server.close()
        self.collectives.close()

    def _timeout_s(self) -> float:
        return DATA_FACTOR * self._stall_detector.stall_threshold_s

    def _send(self, message: ProposalMessage) -> None:
        try:
            send(self._connection, message)
        except OSError as error:
            raise EpochEnded(
                f"{self._name}: the connection to the planner ended: {error}"
            ) from None

    def _read(self) -> None:
        """Read the planner's messages until the epoch is over; end it if the device is too late."""
        decoder = FrameDecoder(MAX_PLAN_MESSAGE_BYTES)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                while self._clock() < self._due_at:
                    if selector.select(TICK_S):
                        for frame in read_frames(self._connection, decoder):
                            self._on_message(unpack(PlanMessage, frame))
            self._end_epoch(f"{self.collectives.position} has not ended in time")
        except (OSError, ValueError) as error:
            self._end_epoch(f"the connection to the planner ended: {error}")
        finally:
            self._connection.close()

    def _on_message(self, plan_message: PlanMessage) -> None:
        with self._changed:
            if plan_message.is_poll:
                self._requested_step = plan_message.step
            else:
                self._plans[plan_message.step] = plan_message
            self._changed.notify_all()
        if plan_message.is_poll:
            self._on_step_requested()

    def _end_epoch(self, reason: str) -> None:
        with self._changed:
            self._end_reason = reason
            self._changed.notify_all()
        # Wake the engine first: the abort returns only when no graph holds the collectives.
        self._on_step_requested()
        self.collectives.abort()


def _connect(rendezvous: Rendezvous, rank: int) -> socket.socket:
    try:
        connection = socket.create_connection((rendezvous.host, rendezvous.port), CONNECT_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(encode_frame(rendezvous.token + RANK_GREETING.pack(rank)))
    except OSError as error:
        raise EpochEnded(f"rank {rank} cannot reach the planner: {error}") from error
    return connection
