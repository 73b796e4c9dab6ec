"""Execution modes of tensor programs, and rules for drafters that are left out of some steps."""

from typing import Protocol

EAGER = "eager"
RECORDED = "recorded"
CAPTURED = "captured"
"""Execution modes.

EAGER: Python executes the program on every call. RECORDED: the first call records the program, and
later calls replay it without Python. CAPTURED: the program is a device graph, captured in advance.
"""


class CatchUpPolicy(Protocol):
    """Rules by which a drafter later processes the tokens of steps that left it out.

    The backlog of a row is what the drafter has not processed yet. The catch-up width of a step is
    how much of the backlog it processes. Both are in units that the drafter defines. In a step
    without drafts, width 0 leaves the drafter out.

    Attributes:
        initial_backlog: Backlog of a row that has just started.
    """

    initial_backlog: int

    def catch_up_width(self, depth: int, backlog: int) -> int:
        """Return the catch-up width for a step of draft depth ``depth``.

        ``backlog`` is the maximum backlog of its rows.
        """

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        """Return the maximum backlog of a row after a step.

        Args:
            before: Maximum backlog before the step.
            depth: Draft depth of the step.
            catch_up_width: Catch-up width of the step.
        """

    def common_widths(self, depth: int) -> tuple[int, ...]:
        """Return the catch-up widths that steps of draft depth ``depth`` usually have.

        The most frequent one is first.
        """
