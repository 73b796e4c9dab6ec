"""Liveness of a rank: a state machine of heartbeats and calls that decides if it gets requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

from tandem.core.errors import RankLost

LivenessPhase = Enum("LivenessPhase", "SILENT READY SUSPECT OUT")
"""Phases of a rank.

SILENT: it has answered no heartbeat yet. READY: it answers heartbeats. SUSPECT: it answers
heartbeats, but a call failed and no later call was answered. OUT: it stopped answering, or its
engine stalled.
"""
LivenessEvent = Enum("LivenessEvent", "HEARTBEAT LOST CALL_FAILED CALL_ANSWERED")
"""Events of a rank.

Heartbeats produce HEARTBEAT and LOST. CALL_FAILED: a call to the rank failed. CALL_ANSWERED: a call
that was sent afterwards is answered.
"""
_NEXT = {
    (LivenessPhase.SILENT, LivenessEvent.HEARTBEAT): LivenessPhase.READY,
    (LivenessPhase.OUT, LivenessEvent.HEARTBEAT): LivenessPhase.READY,
    (LivenessPhase.READY, LivenessEvent.CALL_FAILED): LivenessPhase.SUSPECT,
    (LivenessPhase.SUSPECT, LivenessEvent.CALL_ANSWERED): LivenessPhase.READY,
}
"""Phases after an event, by phase and event.

LOST always leads to OUT. All other events that are not listed leave the phase unchanged.
"""


def next_phase(phase: LivenessPhase, event: LivenessEvent) -> LivenessPhase:
    """Return the phase after ``event``.

    HEARTBEAT does not clear SUSPECT: heartbeats may arrive as frames, which do not prove that calls
    get through.
    """
    return _NEXT.get((phase, event), LivenessPhase.OUT if event is LivenessEvent.LOST else phase)


class Liveness:
    """Liveness of a rank in one epoch. Owned by the gateway's loop.

    Attributes:
        phase: Current phase, changed by ``apply_event`` only.
        is_draining: The rank finishes its sequences and gets no new requests.
        answering: Set while the rank answers heartbeats.
    """

    def __init__(self, name: str) -> None:
        self.phase = LivenessPhase.SILENT
        self.is_draining = False
        self.answering = asyncio.Event()
        self._name = name
        self._loss = RankLost()
        self._cancel_scopes: dict[asyncio.Timeout, None] = {}

    @property
    def is_out(self) -> bool:
        """Whether the rank was found lost, by a failed call or its heartbeats, and is not back."""
        return self.phase in (LivenessPhase.SUSPECT, LivenessPhase.OUT)

    @property
    def is_well(self) -> bool:
        """Whether the rank gets requests."""
        return self.phase is LivenessPhase.READY and not self.is_draining

    def apply_event(self, event: LivenessEvent) -> bool:
        """Apply an event. Return whether it changed ``is_out``."""
        was_out = self.is_out
        self.phase = next_phase(self.phase, event)
        is_heard = self.phase in (LivenessPhase.READY, LivenessPhase.SUSPECT)
        (self.answering.set if is_heard else self.answering.clear)()
        return self.is_out is not was_out

    def mark_lost(self, error: Exception) -> bool:
        """Apply LOST and cancel everything that waits for the rank.

        Returns whether ``is_out`` changed.
        """
        self._loss = error if isinstance(error, RankLost) else RankLost(f"{self._name}: {error!r}")
        while self._cancel_scopes:
            self._cancel_scopes.popitem()[0].reschedule(asyncio.get_running_loop().time())
        return self.apply_event(LivenessEvent.LOST)

    @asynccontextmanager
    async def cancelled_if_lost(self) -> AsyncIterator[None]:
        """Cancel the block as soon as the rank is lost, and raise the error of that loss."""
        try:
            async with asyncio.timeout(None) as scope:
                self._cancel_scopes[scope] = None
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            error = type(self._loss)(str(self._loss))
            error.rank = self._name
            raise error from None
        finally:
            self._cancel_scopes.pop(scope, None)
