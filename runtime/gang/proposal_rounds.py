"""Proposals in, plans out: which message to which rank, decided without any socket."""

from collections import defaultdict
from typing import Generic

from tandem.runtime.lockstep import Decide, Key, Proposal


class ProposalRounds(Generic[Proposal, Key]):
    """The planner's state: proposals of the next step and of later ones that came early."""

    def __init__(self, num_ranks: int, decide: Decide[Proposal, Key]) -> None:
        self.step = 1
        """Which is planned next."""
        self._num_ranks = num_ranks
        self._decide = decide
        self._proposals: dict[int, dict[int, Proposal]] = defaultdict(dict)
        self._polled_step = 0
        """The latest step that silent ranks were asked for."""

    def propose(self, rank: int, step: int, proposal: Proposal) -> None:
        """The same again is no news. A step that is planned already asks for nothing."""
        if step >= self.step:
            self._proposals[step][rank] = proposal

    def ranks_to_poll(self) -> list[int]:
        """Ranks that have to be asked for the next step, once each: somebody wants one."""
        now = self._proposals[self.step]
        if not now or self._polled_step == self.step:
            return []
        self._polled_step = self.step
        return [rank for rank in range(self._num_ranks) if rank not in now]

    def plan(self) -> tuple[int, Key | None] | None:
        """The next step, as soon as all ranks have proposed it."""
        if len(self._proposals[self.step]) < self._num_ranks:
            return None
        step, now = self.step, self._proposals.pop(self.step)
        self.step += 1
        return step, self._decide([now[rank] for rank in range(self._num_ranks)])
