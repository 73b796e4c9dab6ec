"""In which order a decode rank launches its steps and reads them. Both orders emit the same."""

from collections.abc import Callable
from typing import Protocol

from core.request import SequenceUpdate
from decode_node.launcher import InFlight


class SubSteps(Protocol):
    """The parts of a step, as the engine offers them."""

    def must_preempt(self) -> bool:
        """Whether the next step's pages would have to be taken from a sequence."""
        ...

    def make_room(self) -> list[SequenceUpdate]:
        """Pages for the next step; what is told of the sequences that gave theirs."""
        ...

    def launch(self) -> InFlight | None:
        """Start a step of every sequence that goes on, None if there is none."""
        ...

    def finish(self, step: InFlight) -> list[SequenceUpdate]:
        """Read a step and end what ended in it."""
        ...


class Loop(Protocol):
    def turn(self) -> list[SequenceUpdate]:
        """Go on by one step; what to tell."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no step is on its way."""
        ...


class PlainLoop:
    """Each step is read before the next is launched."""

    is_idle = True

    def __init__(self, parts: SubSteps) -> None:
        self._parts = parts

    def turn(self) -> list[SequenceUpdate]:
        updates = self._parts.make_room()
        step = self._parts.launch()
        return updates if step is None else updates + self._parts.finish(step)


class OverlappedLoop:
    """While the device runs a step, the host reads the one before it.

    A sequence that turns out to have ended runs one wasted step, and its row and pages are
    freed after it. Who is preempted must have told all it has, so then the step on its way
    is read first.
    """

    def __init__(self, parts: SubSteps) -> None:
        self._parts = parts
        self._before: InFlight | None = None

    @property
    def is_idle(self) -> bool:
        return self._before is None

    def turn(self) -> list[SequenceUpdate]:
        updates = self._read() if self._parts.must_preempt() else []
        updates += self._parts.make_room()
        step = self._parts.launch()
        updates += self._read()
        self._before = step
        return updates

    def _read(self) -> list[SequenceUpdate]:
        step, self._before = self._before, None
        return [] if step is None else self._parts.finish(step)


LOOPS: dict[str, Callable[[SubSteps], Loop]] = {"plain": PlainLoop, "overlapped": OverlappedLoop}


def create_loop(name: str, device_type: str, parts: SubSteps) -> Loop:
    """The loop called ``name``; "auto" overlaps where device and host run side by side."""
    if name == "auto":
        name = "plain" if device_type == "cpu" else "overlapped"
    if name not in LOOPS:
        raise ValueError(f"decode.loop: {name!r} is unknown, use auto or {list(LOOPS)}")
    return LOOPS[name](parts)
