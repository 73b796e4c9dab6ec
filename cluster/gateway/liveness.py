"""Whether a rank gets requests: a machine of what is told of it, and those who need it alive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

from tandem.core.errors import RankLost

LivenessPhase = Enum("LivenessPhase", "SILENT READY SUSPECT OUT")
"""SILENT has answered no heartbeat yet. READY answers them, and so does SUSPECT, but a call to that
failed and none was answered since. OUT has stopped to answer, or its engine to go on."""
LivenessEvent = Enum("LivenessEvent", "HEARTBEAT LOST CALL_FAILED CALL_ANSWERED")
"""HEARTBEAT and LOST are told by heartbeats. CALL_FAILED: a call to it failed. CALL_ANSWERED: one
that was sent since is answered."""
_NEXT = {
    (LivenessPhase.SILENT, LivenessEvent.HEARTBEAT): LivenessPhase.READY,
    (LivenessPhase.OUT, LivenessEvent.HEARTBEAT): LivenessPhase.READY,
    (LivenessPhase.READY, LivenessEvent.CALL_FAILED): LivenessPhase.SUSPECT,
    (LivenessPhase.SUSPECT, LivenessEvent.CALL_ANSWERED): LivenessPhase.READY,
}
"""What is not here changes nothing, but for LOST, which puts any phase OUT."""


def next_phase(phase: LivenessPhase, event: LivenessEvent) -> LivenessPhase:
    """A SUSPECT that is HEARTBEAT remains one: heartbeats by frames do not say that calls
    arrive."""
    return _NEXT.get((phase, event), LivenessPhase.OUT if event is LivenessEvent.LOST else phase)


class Liveness:
    """The ``phase`` of one life of a rank, changed by the events told here alone; one that
    ``is_draining`` ends what it has and gets nothing new. ``answering`` is set while it answers
    heartbeats. Owned by the gateway's loop."""

    def __init__(self, name: str) -> None:
        self.phase, self.is_draining, self.answering = LivenessPhase.SILENT, False, asyncio.Event()
        self._name, self._loss = name, RankLost()
        self._cancel_scopes: dict[asyncio.Timeout, None] = {}

    @property
    def is_out(self) -> bool:
        """It was found lost."""
        return self.phase in (LivenessPhase.SUSPECT, LivenessPhase.OUT)

    @property
    def is_well(self) -> bool:
        """It gets requests."""
        return self.phase is LivenessPhase.READY and not self.is_draining

    def apply_event(self, event: LivenessEvent) -> bool:
        """Whether it is out by this and was not, or the other way round."""
        was_out, self.phase = self.is_out, next_phase(self.phase, event)
        is_heard = self.phase in (LivenessPhase.READY, LivenessPhase.SUSPECT)
        (self.answering.set if is_heard else self.answering.clear)()
        return self.is_out is not was_out

    def mark_lost(self, error: Exception) -> bool:
        """It is LOST, and nobody waits for it any longer. Whether that is new."""
        self._loss = error if isinstance(error, RankLost) else RankLost(f"{self._name}: {error!r}")
        while self._cancel_scopes:
            self._cancel_scopes.popitem()[0].reschedule(asyncio.get_running_loop().time())
        return self.apply_event(LivenessEvent.LOST)

    @asynccontextmanager
    async def cancelled_if_lost(self) -> AsyncIterator[None]:
        """As soon as its life ends the body does, with the error of that, whatever it awaits."""
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
