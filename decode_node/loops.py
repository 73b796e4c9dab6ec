"""In which order a decode rank launches its steps and reads them. Both orders emit the same."""

from typing import Protocol

from core.request import SequenceUpdate
from decode_node.launcher import InFlight
from decode_node.plan import StepKey
from runtime.lockstep import Plan


class SubSteps(Protocol):
    """The parts of a step, as the engine offers them."""

    def must_preempt(self) -> bool:
        """Whether the next step's pages would have to be taken from a sequence."""
        ...

    def make_room(self) -> list[SequenceUpdate]:
        """Pages for the next step; what is told of the sequences that gave theirs."""
        ...

    def plan(self) -> Plan[StepKey]:
        """What the gang does next, given what this rank proposes."""
        ...

    def launch(self, plan: Plan[StepKey]) -> InFlight | None:
        """Start the planned step with every sequence that goes on, None if none is planned."""
        ...

    def finish(self, step: InFlight) -> list[SequenceUpdate]:
        """Read a step and end what ended in it."""
        ...


class Loop:
    """A turn is: make room, propose and be answered with a plan, launch what it says, read.

    A plain loop reads what it has just launched. An overlapped one reads the step before, while
    the device runs this one: a sequence that turns out to have ended runs one wasted step, and
    its row and pages are freed after it. Who is preempted must have told all it has, so then the
    step on its way is read first.
    """

    def __init__(self, parts: SubSteps, *, overlapped: bool) -> None:
        self._parts = parts
        self._overlapped = overlapped
        self._on_its_way: InFlight | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no step is on its way."""
        return self._on_its_way is None

    def turn(self) -> list[SequenceUpdate]:
        """Go on by one step; what to tell."""
        updates = [] if self.is_idle or not self._parts.must_preempt() else self._read()
        updates += self._parts.make_room()
        step = self._parts.launch(self._parts.plan())
        updates += self._read()
        self._on_its_way = step
        return updates if self._overlapped else updates + self._read()

    def _read(self) -> list[SequenceUpdate]:
        step, self._on_its_way = self._on_its_way, None
        return [] if step is None else self._parts.finish(step)
