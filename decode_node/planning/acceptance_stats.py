"""Acceptance statistics of a step, by depth, for its draft shape and all smaller shapes.

Transition k of a draft shape leads from depth k to depth k + 1: one more draft is accepted. Shapes
with the same nodes up to depth k + 1 share this transition. All chains therefore share their
transitions. Plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.draft_shapes import DraftShapes

AcceptedPath = tuple[int, Sequence[int]]
"""For one row: the maximum number of drafts that it may accept, and the accepted nodes in path
order."""


@dataclass(frozen=True, slots=True)
class DepthTransitions:
    """Numbering of the transitions of all draft shapes.

    Attributes:
        bounds: ``(num_nodes, depth)`` of each transition, which leads from ``depth`` to ``depth +
            1`` among the first ``num_nodes`` nodes.
        by_shape: Numbers of the transitions of each shape, by depth.
        num_visible: Number of transitions that a step of each shape measures. They are the first
            ones: those of the shape itself and of all smaller shapes.
    """

    bounds: tuple[tuple[int, int], ...]
    by_shape: tuple[tuple[int, ...], ...]
    num_visible: tuple[int, ...]

    @classmethod
    def from_shapes(cls, draft_shapes: DraftShapes) -> "DepthTransitions":
        known: dict[tuple[object, int], int] = {}
        bounds: list[tuple[int, int]] = []
        by_shape = []
        num_visible = []
        for number, draft_shape in enumerate(draft_shapes):
            transitions = []
            for depth in range(draft_shape.depth):
                nodes = draft_shape.nodes_up_to_depth(depth + 1)
                transitions.append(known.setdefault((nodes or number, depth), len(bounds)))
                if transitions[-1] == len(bounds):
                    bounds.append((draft_shape.num_nodes, depth))
            by_shape.append((*transitions,))
            num_visible.append(len(bounds))
        return cls((*bounds,), (*by_shape,), (*num_visible,))

    def count(
        self, shape_index: int, rows: Sequence[AcceptedPath]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Count attempts and successes of each transition that a step of ``shape_index`` measures.

        Returns:
            Numbers of rows that reached the start of each transition and may go deeper; numbers of
                rows that reached its end.
        """
        visible = self.bounds[: self.num_visible[shape_index]]
        num_attempts = (
            sum(limit > k and _reaches(path, n, k) for limit, path in rows) for n, k in visible
        )
        num_successes = (sum(_reaches(path, n, k + 1) for _, path in rows) for n, k in visible)
        return (*num_attempts,), (*num_successes,)


def _reaches(path: Sequence[int], num_nodes: int, depth: int) -> bool:
    """Return whether ``path`` reaches ``depth`` within the first ``num_nodes`` nodes."""
    return depth == 0 or (len(path) >= depth and path[depth - 1] <= num_nodes)
