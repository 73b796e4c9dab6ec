"""The planner's decisions for each step: which ranks to poll, and the plan. Uses no sockets."""

from collections import defaultdict
from typing import Generic

from tandem.runtime.lockstep import Decide, Key, Proposal


class ProposalRounds(Generic[Proposal, Key]):
    """State of the planner: proposals for the next step, and early ones for later steps."""

    def __init__(self, num_ranks: int, decide: Decide[Proposal, Key]) -> None:
        self.step = 1
        """Number of the step that is planned next."""
        self._num_ranks = num_ranks
        self._decide = decide
        self._proposals: dict[int, dict[int, Proposal]] = defaultdict(dict)
        self._polled_step = 0
        """Number of the latest step for which ``ranks_to_poll`` has returned ranks."""

    def propose(self, rank: int, step: int, proposal: Proposal) -> None:
        """Store a proposal. Ignore it if its step is already planned. Duplicates have no effect."""
        if step >= self.step:
            self._proposals[step][rank] = proposal

    def ranks_to_poll(self) -> list[int]:
        """Return the ranks to poll for a proposal for the next step.

        These are the ranks that have not proposed it although another rank has. They are returned
        once per step.
        """
        now = self._proposals[self.step]
        if not now or self._polled_step == self.step:
            return []
        self._polled_step = self.step
        return [rank for rank in range(self._num_ranks) if rank not in now]

    def plan(self) -> tuple[int, Key | None] | None:
        """Plan the next step if all ranks have proposed it; otherwise return None.

        Returns:
            Number of the step, and its key, which is None if no rank has work.
        """
        if len(self._proposals[self.step]) < self._num_ranks:
            return None
        step = self.step
        now = self._proposals.pop(self.step)
        self.step += 1
        return step, self._decide([now[rank] for rank in range(self._num_ranks)])
