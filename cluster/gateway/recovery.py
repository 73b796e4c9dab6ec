"""What one answer has been through, and what follows from another failure."""

from dataclasses import dataclass, field
from functools import partial

from tandem.cluster.gateway.fleet import POLL_PERIOD_S, Fleet
from tandem.cluster.gateway.handles import AttemptRoute, RankHandle
from tandem.cluster.gateway.retries import Retries
from tandem.cluster.gateway.router import RankPair
from tandem.core.errors import (
    HandoverError,
    Overloaded,
    PoisonRequest,
    RankDied,
    RankLost,
    StepFailed,
)
from tandem.core.identity import Identity
from tandem.core.membership import InFlightBatch
from tandem.core.tasks import poll_until

MAX_FAILURES = 4
"""Lost nodes, broken hand-overs and failed steps that one answer may meet without a token in
between."""
MAX_FATAL_STEPS = 3
"""Steps that killed a rank with one answer in them, whatever tokens came in between."""
MAX_RETRY_PAUSE_S = 1.0
CAUSE_TIMEOUT_S = 3.0
"""How long an answer that may have killed a rank waits to be told before it goes on elsewhere."""


@dataclass(slots=True)
class AttemptHistory:
    """Of one answer in a ``fleet``. It ``has_failed`` once it was in a step that failed;
    ``lost_attempts`` are its attempts on ranks that were lost, ``dead_ranks`` ranks that died
    meanwhile, ``avoided_pairs`` pairs of ranks between which a hand-over of it failed."""

    fleet: Fleet
    retries: Retries = field(default_factory=lambda: Retries(MAX_RETRY_PAUSE_S))
    has_failed: bool = False
    lost_attempts: set[Identity] = field(default_factory=set)
    dead_ranks: list[RankHandle] = field(default_factory=list)
    avoided_pairs: set[RankPair] = field(default_factory=set)

    async def on_failure(
        self, error: Exception, pair: AttemptRoute | None, is_resumed: bool
    ) -> None:
        """Learn from it, and return when it is time for another try. A rank that is lost gets no
        more requests until it answers again.

        Raises PoisonRequest when the answer itself is what fails steps: one that failed with it
        alone was its second. ``error`` if there were too many, if what has begun has waited for a
        ``pair`` in vain, or what has not finds no room.
        """
        if isinstance(error, PoisonRequest) and (self.has_failed or self._fatal_steps()):
            raise error
        if isinstance(error, StepFailed):
            self.has_failed = True
        if pair is not None and isinstance(error, RankLost):
            await self._mark_lost(error, pair)
        if pair is not None and isinstance(error, HandoverError):
            self.avoided_pairs.add((pair.prefill, pair.decode))
        self.is_suspect()
        has_waited = is_resumed and pair is None
        finds_no_room = isinstance(error, Overloaded) and not is_resumed
        if has_waited or finds_no_room or self.retries.num_failures == MAX_FAILURES:
            raise error
        await self.retries.pause()

    def is_suspect(self) -> bool:
        """Whether by what is known now it may have been in a step that failed, or that killed its
        rank: who was there when it died may, until it is told what of.

        Raises PoisonRequest when it was alone in one that did and this is its second, or in
        MAX_FATAL_STEPS of them.
        """
        fatal_steps = self._fatal_steps()
        if (self.has_failed or len(fatal_steps) > 1) and any(
            step.is_isolated for step in fatal_steps
        ):
            raise PoisonRequest(
                "it was alone in the step that killed a rank: it is not tried again"
            )
        if len(fatal_steps) >= MAX_FATAL_STEPS:
            raise PoisonRequest(
                f"it was in {len(fatal_steps)} steps that killed a rank: not tried again"
            )
        return (
            self.has_failed
            or bool(fatal_steps)
            or not all(map(self.fleet.is_cause_known, self.dead_ranks))
        )

    def _fatal_steps(self) -> list[InFlightBatch]:
        return [
            step
            for step in self.fleet.fatal_steps
            if not self.lost_attempts.isdisjoint(step.identities)
        ]

    async def _mark_lost(self, error: RankLost, pair: AttemptRoute) -> None:
        """Leave the rank alone. Who was suspected there, so that it was alone in its steps, waits a
        little to be told whether it is to blame."""
        self.lost_attempts.add(pair.identity)
        for rank in dict.fromkeys((pair.prefill, pair.decode)):
            if rank.epoch_name == error.rank:
                self.fleet.mark_suspect(rank, error)
                if isinstance(error, RankDied):
                    self.dead_ranks.append(rank)
                    if pair.is_suspect:
                        await poll_until(
                            partial(self.fleet.is_cause_known, rank), CAUSE_TIMEOUT_S, POLL_PERIOD_S
                        )
