"""How the ranks of a gang agree on a step: each makes a proposal, one planner answers all of them
with one plan, and what a rank then launches derives from the plan alone (design.md, Parallelism).
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
"""The step that suits all ranks' proposals, in the order of ranks; None if none has work. The
planner alone calls it."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[Key]):
    """Step ``step`` of a gang's life; ``key`` fixes every shape that ranks share. Without one no
    rank has work, and none launches."""

    step: int
    key: Key | None


class Planner(Protocol[ProposalIn, Key]):
    """``is_poll``: other ranks want a step, so this one has to propose, work or no work."""

    @property
    def is_step_requested(self) -> bool: ...

    def plan(self, proposal: ProposalIn) -> Plan[Key]:
        """The gang's next step, for a rank that proposes this; waits for the other ranks. Raises
        EpochEnded when there is no next one."""

    def collective_section(self) -> AbstractContextManager[None]:
        """Around the part of a step that all ranks compute together."""

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Around the host's waits for what ranks compute together. It takes no longer than other
        ranks are waited for, and raises EpochEnded if its collectives were aborted meanwhile."""


class LocalPlanner(Generic[Proposal, Key]):
    """Of a gang of one rank: what all propose is what this one does."""

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
    """One rank's place in one life of its gang. Here it is alone and ``collectives`` are None; that
    of a rank among others is runtime/gang/gang_lockstep.py."""

    collectives: CollectiveGroup | None = None

    def planner(
        self,
        decide: Decide[Proposal, Key],
        schema: tuple[type[Proposal], type[Key]],
        on_step_requested: Callable[[], None],
    ) -> Planner[Proposal, Key]:
        """Called once, before the engine's first step. ``schema`` are the classes of proposals and
        keys; ``on_step_requested`` is called on any thread when ``is_poll`` has become true."""
        return LocalPlanner(decide)

    def close(self) -> None:
        """Leave, which ends this life for every rank."""
