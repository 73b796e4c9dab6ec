"""Agreement of a gang's ranks on each step: all ranks propose, one planner answers with one plan.

A rank derives everything that it launches from the plan alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tandem.model.network.dispatch.base import CollectiveGroup

Proposal = TypeVar("Proposal")
ProposalIn = TypeVar("ProposalIn", contravariant=True)
Key = TypeVar("Key")
Decide = Callable[[Sequence[Proposal]], Key | None]
"""Function that chooses the next step from the proposals of all ranks, which are in rank order.

Returns the key of the step, or None if no rank has work. Only the planner calls it.
"""


@dataclass(frozen=True, slots=True)
class Plan(Generic[Key]):
    """Plan of one step.

    Attributes:
        step: Number of the step within the epoch.
        key: Key that determines all shapes that the ranks share. None if no rank has work; then no
            rank launches anything.
    """

    step: int
    key: Key | None


class Planner(Protocol[ProposalIn, Key]):
    """Interface through which an engine gets the plans of its steps.

    ``is_step_requested``: whether other ranks want a step. This rank must then propose, even if it
    has no work.
    """

    @property
    def is_step_requested(self) -> bool: ...

    def plan(self, proposal: ProposalIn) -> Plan[Key]:
        """Propose the next step and return the gang's plan for it. Waits for the other ranks.

        Raises EpochEnded if there is no next step.
        """

    def collective_section(self) -> AbstractContextManager[None]:
        """Return a context for the part of a step that all ranks compute together."""

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Return a context in which the host waits for results of the device.

        These results may need the other ranks, so the wait is limited by the timeout for other
        ranks. Raises EpochEnded if the collectives are aborted during the wait.
        """


class LocalPlanner(Generic[Proposal, Key]):
    """Planner of a gang of one rank: the rank's own proposal decides."""

    is_step_requested = False

    def __init__(self, decide: Decide[Proposal, Key]) -> None:
        self._decide = decide
        self._step = 0

    def plan(self, proposal: Proposal) -> Plan[Key]:
        self._step += 1
        return Plan(self._step, self._decide((proposal,)))

    def collective_section(self) -> AbstractContextManager[None]:
        return nullcontext()

    def waiting_for_device(self) -> AbstractContextManager[None]:
        return nullcontext()


class Lockstep:
    """Membership of one rank in one epoch of its gang.

    This class is for a gang of one rank, whose ``collectives`` are None. For several ranks see
    runtime/gang/gang_lockstep.py.
    """

    collectives: CollectiveGroup | None = None

    def planner(
        self,
        decide: Decide[Proposal, Key],
        schema: tuple[type[Proposal], type[Key]],
        on_step_requested: Callable[[], None],
    ) -> Planner[Proposal, Key]:
        """Return this rank's planner. Called once, before the engine's first step.

        Args:
            decide: Function that chooses the step; called on rank 0 only.
            schema: Class of the proposals and class of the keys.
            on_step_requested: Called on any thread when ``is_step_requested`` has become true.
        """
        return LocalPlanner(decide)

    def close(self) -> None:
        """Leave the gang, which ends this epoch for all of its ranks."""
