"""What one answer has been through, and what follows from another failure."""

from dataclasses import dataclass, field
from functools import partial

from tandem.cluster.gateway.fleet import AGAIN_S, Fleet
from tandem.cluster.gateway.handles import Handle, Pair
from tandem.cluster.gateway.retries import Retries
from tandem.cluster.gateway.router import Ranks
from tandem.core.errors import HandoverError, Overloaded, Poisonous, RankDied, RankLost, StepFailed
from tandem.core.identity import Identity
from tandem.core.membership import InStep
from tandem.core.tasks import until

MAX_FAILURES = 4
"""Lost nodes, broken hand-overs and failed steps that one answer may meet without a token in
between."""
MAX_DEATHS = 3
"""Steps that killed a rank with one answer in them, whatever tokens came in between."""
LONGEST_TRIAL_PAUSE_S = 1.0
VERDICT_S = 3.0
"""How long an answer that may have killed a rank waits to be told before it goes on elsewhere."""


@dataclass(slots=True)
class Trials:
    """Of one answer in a ``fleet``. It ``has_failed`` once it was in a step that failed; ``lost``
    are its attempts on ranks that were lost, ``dead`` ranks that died meanwhile, ``avoided`` pairs
    of ranks between which a hand-over of it failed."""

    fleet: Fleet
    retries: Retries = field(default_factory=lambda: Retries(LONGEST_TRIAL_PAUSE_S))
    has_failed: bool = False
    lost: set[Identity] = field(default_factory=set)
    dead: list[Handle] = field(default_factory=list)
    avoided: set[Ranks] = field(default_factory=set)

    async def failed(self, error: Exception, pair: Pair | None, is_begun: bool) -> None:
        """Learn from it, and return when it is time for another try. A rank that is lost gets no
        more requests until it answers again.

        Raises Poisonous when the answer itself is what fails steps: one that failed with it alone
        was its second. ``error`` if there were too many, if what has begun has waited for a
        ``pair`` in vain, or what has not finds no room.
        """
        if isinstance(error, Poisonous) and (self.has_failed or self._deaths()):
            raise error
        if isinstance(error, StepFailed):
            self.has_failed = True
        if pair is not None and isinstance(error, RankLost):
            await self._lose(error, pair)
        if pair is not None and isinstance(error, HandoverError):
            self.avoided.add((pair.prefill, pair.decode))
        self.is_suspect()
        has_waited = is_begun and pair is None
        finds_no_room = isinstance(error, Overloaded) and not is_begun
        if has_waited or finds_no_room or self.retries.num_failures == MAX_FAILURES:
            raise error
        await self.retries.pause()

    def is_suspect(self) -> bool:
        """Whether by what is known now it may have been in a step that failed, or that killed its
        rank: who was there when it died may, until it is told what of.

        Raises Poisonous when it was alone in one that did and this is its second, or in MAX_DEATHS
        of them.
        """
        deaths = self._deaths()
        if (self.has_failed or len(deaths) > 1) and any(step.is_alone for step in deaths):
            raise Poisonous("it was alone in the step that killed a rank: it is not tried again")
        if len(deaths) >= MAX_DEATHS:
            raise Poisonous(f"it was in {len(deaths)} steps that killed a rank: not tried again")
        return self.has_failed or bool(deaths) or not all(map(self.fleet.has_verdict, self.dead))

    def _deaths(self) -> list[InStep]:
        return [step for step in self.fleet.deaths if not self.lost.isdisjoint(step.identities)]

    async def _lose(self, error: RankLost, pair: Pair) -> None:
        """Leave the rank alone. Who was suspected there, so that it was alone in its steps, waits a
        little to be told whether it is to blame."""
        self.lost.add(pair.identity)
        for rank in dict.fromkeys((pair.prefill, pair.decode)):
            if rank.life == error.rank:
                self.fleet.accuse(rank, error)
                if isinstance(error, RankDied):
                    self.dead.append(rank)
                    if pair.is_suspect:
                        await until(partial(self.fleet.has_verdict, rank), VERDICT_S, AGAIN_S)
