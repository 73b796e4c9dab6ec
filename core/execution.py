"""Forms in which functions of tensors are called again and again, and how far drafters are behind:
what plans of steps are told in."""

from typing import Protocol

EAGER, RECORDED, CAPTURED = "eager", "recorded", "captured"
"""In Python each time; played without Python, made by the first call; a graph, made ahead."""


class CatchUpPolicy(Protocol):
    """How a drafter that a step may leave out catches up later. Both how far a row is *behind* and
    how much a step catches up with are numbers of the drafter's own; 0 of the latter: it is left
    out of a step without drafts. ``start``: how far a row is behind that has just begun."""

    initial_backlog: int

    def catch_up_width(self, depth: int, backlog: int) -> int:
        """What such a step has to catch up with if no row is further ``behind``."""

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        """How far a row is behind, at most, after such a step."""

    def common_widths(self, depth: int) -> tuple[int, ...]:
        """The amounts of such steps while nothing unusual happens, the most frequent first."""
