"""Whether a rank gets requests: a machine of what is told of it, and those who need it alive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

from tandem.core.errors import RankLost

Phase = Enum("Phase", "SILENT READY SUSPECT OUT")
"""SILENT has answered no heartbeat yet. READY answers them, and so does SUSPECT, but a call to that
failed and none was answered since. OUT has stopped to answer, or its engine to go on."""
Event = Enum("Event", "HEARD LOST ACCUSED ANSWERED")
"""HEARD and LOST are told by heartbeats. ACCUSED: a call to it failed. ANSWERED: one that was sent
since is answered."""
_NEXT = {
    (Phase.SILENT, Event.HEARD): Phase.READY,
    (Phase.OUT, Event.HEARD): Phase.READY,
    (Phase.READY, Event.ACCUSED): Phase.SUSPECT,
    (Phase.SUSPECT, Event.ANSWERED): Phase.READY,
}
"""What is not here changes nothing, but for LOST, which puts any phase OUT."""


def after(phase: Phase, event: Event) -> Phase:
    """A SUSPECT that is HEARD remains one: heartbeats by frames do not say that calls arrive."""
    return _NEXT.get((phase, event), Phase.OUT if event is Event.LOST else phase)


class Liveness:
    """The ``phase`` of one life of a rank, changed by the events told here alone; one that
    ``is_draining`` ends what it has and gets nothing new. ``heard`` is set while it answers
    heartbeats. Owned by the gateway's loop."""

    def __init__(self, name: str) -> None:
        self.phase, self.is_draining, self.heard = Phase.SILENT, False, asyncio.Event()
        self._name, self._loss = name, RankLost()
        self._needing: dict[asyncio.Timeout, None] = {}

    @property
    def is_out(self) -> bool:
        """It was found lost."""
        return self.phase in (Phase.SUSPECT, Phase.OUT)

    @property
    def is_well(self) -> bool:
        """It gets requests."""
        return self.phase is Phase.READY and not self.is_draining

    def tell(self, event: Event) -> bool:
        """Whether it is out by this and was not, or the other way round."""
        was_out, self.phase = self.is_out, after(self.phase, event)
        is_heard = self.phase in (Phase.READY, Phase.SUSPECT)
        (self.heard.set if is_heard else self.heard.clear)()
        return self.is_out is not was_out

    def end(self, error: Exception) -> bool:
        """It is LOST, and nobody waits for it any longer. Whether that is new."""
        self._loss = error if isinstance(error, RankLost) else RankLost(f"{self._name}: {error!r}")
        while self._needing:
            self._needing.popitem()[0].reschedule(asyncio.get_running_loop().time())
        return self.tell(Event.LOST)

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """As soon as its life ends the body does, with the error of that, whatever it awaits."""
        try:
            async with asyncio.timeout(None) as scope:
                self._needing[scope] = None
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            error = type(self._loss)(str(self._loss))
            error.rank = self._name
            raise error from None
        finally:
            self._needing.pop(scope, None)
