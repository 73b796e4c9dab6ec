"""What one answer has been through, and what follows from another failure."""

from dataclasses import dataclass, field

from cluster.gateway.fleet import Fleet, Pair
from cluster.gateway.retries import Retries
from core.errors import (
    HandoverError,
    NodeLost,
    Overloaded,
    Poisonous,
    RankDied,
    StepFailed,
    TandemError,
)

MAX_FAILURES = 4
"""Lost nodes, broken hand-overs and failed steps that one answer may meet without a token in
between."""
LONGEST_PAUSE_S = 1.0


@dataclass(slots=True)
class Trials:
    """Of one answer. It ``is_suspect`` once it was in a step that failed; ``avoided`` are pairs of
    ranks, by name, between which a hand-over of it failed."""

    retries: Retries = field(default_factory=lambda: Retries(LONGEST_PAUSE_S))
    is_suspect: bool = False
    avoided: set[tuple[str, str]] = field(default_factory=set)

    async def failed(
        self, error: TandemError, pair: Pair | None, fleet: Fleet, is_begun: bool
    ) -> None:
        """Learn from it, and return when it is time for another try. A rank that is lost gets no
        more requests until it answers again.

        Raises Poisonous when the answer itself is what fails steps; ``error`` if there were too
        many, if what has begun has waited for a ``pair`` in vain, or what has not finds no room.
        """
        if isinstance(error, Poisonous):
            raise error
        if isinstance(error, StepFailed):
            self.is_suspect = True
        if pair is not None and isinstance(error, NodeLost):
            await self._lost(error, pair, fleet)
        if pair is not None and isinstance(error, HandoverError):
            self.avoided.add(pair.names)
        has_waited = is_begun and pair is None
        finds_no_room = isinstance(error, Overloaded) and not is_begun
        if has_waited or finds_no_room or self.retries.num_failures == MAX_FAILURES:
            raise error
        await self.retries.pause()

    async def _lost(self, error: NodeLost, pair: Pair, fleet: Fleet) -> None:
        """Leave the rank alone; if it died of a step, find out whether this answer was in it."""
        lost = next((rank for rank in (pair.prefill, pair.decode) if rank.name == error.node), None)
        if lost is None:
            return
        fleet.lose(lost, error)
        if not isinstance(error, RankDied):
            return
        in_step = await fleet.verdict(lost)
        if in_step is None or pair.identity not in in_step.identities:
            return
        if in_step.is_alone:
            raise Poisonous(
                f"{pair.identity} was alone in the step that killed {lost.name}, after it had been "
                "in another that failed: it is not tried again"
            ) from error
        self.is_suspect = True
