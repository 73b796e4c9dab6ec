"""Rounds of proposals: which message goes to which rank, decided without any socket."""

from collections import defaultdict
from typing import Generic

from tandem.runtime.lockstep import Decide, Key, Proposal


class ProposalRounds(Generic[Proposal, Key]):
    """State of the planner: proposals for the next step, and early ones for later steps."""

    def __init__(self, num_ranks: int, decide: Decide[Proposal, Key]) -> None:
        self.step = 1
        """The step that is planned next."""
        self._num_ranks = num_ranks
        self._decide = decide
        self._proposals: dict[int, dict[int, Proposal]] = defaultdict(dict)
        self._polled_step = 0
        """The latest step for which silent ranks were polled."""

    def propose(self, rank: int, step: int, proposal: Proposal) -> None:
        """Store a proposal. Duplicates, and proposals for steps already planned, have no effect."""
        if step >= self.step:
            self._proposals[step][rank] = proposal

    def ranks_to_poll(self) -> list[int]:
        """Return the ranks to poll for the next step, once per step.

        A rank is polled if another rank has proposed the step and this rank has not.
        """
        now = self._proposals[self.step]
        if not now or self._polled_step == self.step:
            return []
        self._polled_step = self.step
        return [rank for rank in range(self._num_ranks) if rank not in now]

    def plan(self) -> tuple[int, Key | None] | None:
        """Plan the next step if all ranks have proposed it, otherwise return None."""
        if len(self._proposals[self.step]) < self._num_ranks:
            return None
        step = self.step
        now = self._proposals.pop(self.step)
        self.step += 1
        return step, self._decide([now[rank] for rank in range(self._num_ranks)])
