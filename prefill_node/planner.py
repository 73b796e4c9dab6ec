"""What a prefill step shall be: as many rows of packed tokens on every rank as the fullest has."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime import lockstep


@dataclass(frozen=True, slots=True)
class Proposal:
    """Real tokens that a rank has chosen for the next step; 0 if it has no work."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepKey:
    """``num_tokens`` are the rows of the forward, padding included."""

    num_tokens: int


class LocalPlanner(lockstep.LocalPlanner[Proposal, StepKey]):
    """Of a gang of one rank, which pads nothing."""

    def decide(self, proposals: Sequence[Proposal]) -> StepKey | None:
        return plan_step(proposals)


def plan_step(proposals: Sequence[Proposal]) -> StepKey | None:
    """The step that suits all ranks, None if none has work."""
    most = max(proposal.num_tokens for proposal in proposals)
    return StepKey(most) if most else None
