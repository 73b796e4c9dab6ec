"""Failure history of one answer, and the decision whether it is retried."""

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
"""Maximum number of failures of an answer between two of its tokens.

Lost ranks, failed hand-overs and failed steps count.
"""
MAX_FATAL_STEPS = 3
"""Number of fatal steps that contained an answer after which it is not retried.

A fatal step killed a rank. Progress of the answer does not reset the number.
"""
MAX_RETRY_PAUSE_S = 1.0
CAUSE_TIMEOUT_S = 3.0
"""Seconds that a suspected answer waits for the cause of a rank's death before it is retried."""


@dataclass(slots=True)
class AttemptHistory:
    """Failure history of one answer.

    Attributes:
        fleet: Ranks of the gateway.
        has_failed: The answer was part of a step that failed.
        lost_attempts: Attempts on ranks that were lost.
        dead_ranks: Ranks that died during an attempt.
        avoided_pairs: Pairs of ranks between which a hand-over of the answer failed.
    """

    fleet: Fleet
    retries: Retries = field(default_factory=lambda: Retries(MAX_RETRY_PAUSE_S))
    has_failed: bool = False
    lost_attempts: set[Identity] = field(default_factory=set)
    dead_ranks: list[RankHandle] = field(default_factory=list)
    avoided_pairs: set[RankPair] = field(default_factory=set)

    async def on_failure(
        self, error: Exception, pair: AttemptRoute | None, is_resumed: bool
    ) -> None:
        """Record a failure, and return when it is time for the next attempt.

        A lost rank gets no more requests until it answers again.

        Args:
            error: Error that ended the attempt.
            pair: Ranks of the attempt; None if none could be chosen.
            is_resumed: The answer already has tokens.

        Raises:
            PoisonRequest: The answer itself makes steps fail. A step with this answer alone failed,
                and that was not its first failure.
            Exception: ``error``, after too many failures. Also if a resumed answer found no pair,
                or if the cluster is overloaded for a new one.
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
        """Whether the answer may have been in a step that failed or killed its rank.

        An answer is suspected after its rank has died, until the cause is known.

        Raises:
            PoisonRequest: The answer was alone in a fatal step that was not its first failure, or
                in MAX_FATAL_STEPS fatal steps.
        """
        fatal_steps = self._fatal_steps()
        if (self.has_failed or len(fatal_steps) > 1) and any(
            step.is_isolated for step in fatal_steps
        ):
            raise PoisonRequest(
                "the request was alone in a step that killed a rank, so it is not retried"
            )
        if len(fatal_steps) >= MAX_FATAL_STEPS:
            raise PoisonRequest(
                f"the request was in {len(fatal_steps)} steps that killed a rank; it is not retried"
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
        """Stop using the lost rank.

        If the rank died while it held the suspected answer, wait for the cause, at most
        CAUSE_TIMEOUT_S. The answer ran in steps of its own, so it may be the cause.
        """
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
