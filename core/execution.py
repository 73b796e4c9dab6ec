"""Execution modes of tensor programs, and catch-up of drafters that were left out of steps."""

from typing import Protocol

EAGER, RECORDED, CAPTURED = "eager", "recorded", "captured"
"""Run in Python on every call; replayed without Python, recorded by the first call; a device graph,
captured in advance."""


class CatchUpPolicy(Protocol):
    """How a drafter that may be left out of steps catches up later.

    Backlog (how far a row lags) and catch-up width (how much one step catches up) are in units of
    the drafter. Width 0 means that a step without drafts leaves the drafter out.

    Attributes:
        initial_backlog: Backlog of a row that has just started.
    """

    initial_backlog: int

    def catch_up_width(self, depth: int, backlog: int) -> int:
        """Return the width that such a step needs if no row has more than ``backlog``."""

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        """Return the maximum backlog of a row after such a step."""

    def common_widths(self, depth: int) -> tuple[int, ...]:
        """Return the widths of such steps in normal operation, the most frequent first."""
