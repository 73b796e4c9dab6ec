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
"""Function that chooses the step for the proposals of all ranks, in the order of ranks.

Returns None if no rank has work. Only the planner calls it.
"""


@dataclass(frozen=True, slots=True)
class Plan(Generic[Key]):
    """Plan of one step.

    Attributes:
        step: Number of the step within the epoch.
        key: Key that fixes every shape that ranks share; None if no rank has work and none
            launches.
    """

    step: int
    key: Key | None


class Planner(Protocol[ProposalIn, Key]):
    """Source of a rank's plans.

    ``is_step_requested``: other ranks want a step, so this rank has to propose, even without work.
    """

    @property
    def is_step_requested(self) -> bool: ...

    def plan(self, proposal: ProposalIn) -> Plan[Key]:
        """Return the gang's next step, given this rank's proposal. Waits for the other ranks.

        Raises EpochEnded if there is no next step.
        """

    def collective_section(self) -> AbstractContextManager[None]:
        """Return a context for the part of a step that all ranks compute together."""

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Return a context for the host's waits for results that ranks compute together.

        Waits are bounded by the timeout for other ranks. Raises EpochEnded if the collectives were
        aborted during the wait.
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
        """Return the planner. Called once, before the engine's first step.

        Args:
            decide: Chooses the step; used by the planner on rank 0.
            schema: Classes of proposals and keys.
            on_step_requested: Called on any thread when ``is_step_requested`` has become true.
        """
        return LocalPlanner(decide)

    def close(self) -> None:
        """Leave the gang, which ends this epoch for every rank."""
