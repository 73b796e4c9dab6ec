"""What a step tells of drafts: how far rows came, at each of its level and of every level below.

A rung is the step from one depth of a level to the next. Levels that have the same nodes down to
there share it, as all chains do. Plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.draft_shapes import DraftShapes

AcceptedPath = tuple[int, Sequence[int]]
"""Of a row: the most drafts that it may accept, and the nodes that it did, in order."""


@dataclass(frozen=True, slots=True)
class DepthTransitions:
    """Rung r leads on from depth ``bounds[r][1]`` among the first ``bounds[r][0]`` nodes.
    ``by_shape[l]`` are those of level l, by depth; it and those below have the first
    ``num_visible[l]``."""

    bounds: tuple[tuple[int, int], ...]
    by_shape: tuple[tuple[int, ...], ...]
    num_visible: tuple[int, ...]

    @classmethod
    def from_shapes(cls, levels: DraftShapes) -> "DepthTransitions":
        known: dict[tuple[object, int], int] = {}
        bounds: list[tuple[int, int]] = []
        by_shape, num_visible = [], []
        for number, level in enumerate(levels):
            transitions = []
            for depth in range(level.depth):
                nodes = level.nodes_up_to_depth(depth + 1)
                transitions.append(known.setdefault((nodes or number, depth), len(bounds)))
                if transitions[-1] == len(bounds):
                    bounds.append((level.num_nodes, depth))
            by_shape.append((*transitions,))
            num_visible.append(len(bounds))
        return cls((*bounds,), (*by_shape,), (*num_visible,))

    def count(
        self, level: int, rows: Sequence[AcceptedPath]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By rung of this level and those below: rows that came to where it begins and may go on,
        and those of them that did."""
        visible = self.bounds[: self.num_visible[level]]
        num_attempts = (
            sum(limit > k and _reaches(path, n, k) for limit, path in rows) for n, k in visible
        )
        num_successes = (sum(_reaches(path, n, k + 1) for _, path in rows) for n, k in visible)
        return (*num_attempts,), (*num_successes,)


def _reaches(path: Sequence[int], num_nodes: int, depth: int) -> bool:
    """Whether a path goes down to ``depth`` if there are but so many nodes."""
    return depth == 0 or (len(path) >= depth and path[depth - 1] <= num_nodes)
