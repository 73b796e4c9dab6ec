"""Execution modes of tensor programs, and catch-up of drafters that were left out of steps."""

from typing import Protocol

EAGER = "eager"
RECORDED = "recorded"
CAPTURED = "captured"
"""EAGER: executed by Python on every call. RECORDED: recorded by the first call, replayed without
Python. CAPTURED: a device graph, captured in advance."""


class CatchUpPolicy(Protocol):
    """Rules by which a drafter that may be left out of steps catches up later.

    Backlog (how far a row lags) and catch-up width (how much one step catches up) are in units of
    the drafter. Width 0 leaves the drafter out of a step without drafts.

    Attributes:
        initial_backlog: Backlog of a row that has just started.
    """

    initial_backlog: int

    def catch_up_width(self, depth: int, backlog: int) -> int:
        """Return the width for a step of draft depth ``depth`` if no row has more ``backlog``."""

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        """Return the maximum backlog of a row after a step.

        Args:
            before: Maximum backlog before the step.
            depth: Draft depth of the step.
            catch_up_width: Catch-up width of the step.
        """

    def common_widths(self, depth: int) -> tuple[int, ...]:
        """Return the widths usual for steps of draft depth ``depth``, the most frequent first."""
