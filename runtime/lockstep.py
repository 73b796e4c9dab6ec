"""How the ranks of a gang agree on a step: each makes a proposal, one planner answers all of them
with one plan, and what a rank then launches derives from the plan alone (design.md, Parallelism).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Proposal = TypeVar("Proposal")
Asked = TypeVar("Asked", contravariant=True)
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Plan(Generic[Key]):
    """Step ``step`` of the gang's life ``epoch``; ``key`` fixes every shape that ranks share.
    Without one no rank has work, and none launches."""

    epoch: int
    step: int
    key: Key | None


class Planner(Protocol[Asked, Key]):
    def plan(self, proposal: Asked) -> Plan[Key]:
        """The gang's next step, for a rank that proposes this. May wait for the other ranks."""
        ...


class LocalPlanner(ABC, Generic[Proposal, Key]):
    """The planner of a gang of one rank: what all propose is what this one does."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._step = 0

    def plan(self, proposal: Proposal) -> Plan[Key]:
        self._step += 1
        return Plan(self._epoch, self._step, self.decide((proposal,)))

    @abstractmethod
    def decide(self, proposals: Sequence[Proposal]) -> Key | None:
        """The step that suits all ranks, None if none has work."""
