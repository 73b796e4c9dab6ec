"""Acceptance statistics of a step, by depth, for its draft shape and all smaller shapes.

A transition leads from one depth of a draft shape to the next. Shapes that have the same nodes up
to the deeper end share the transition; all chains do. Plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.draft_shapes import DraftShapes

AcceptedPath = tuple[int, Sequence[int]]
"""Maximum number of drafts that a row may accept, and the accepted nodes in path order."""


@dataclass(frozen=True, slots=True)
class DepthTransitions:
    """Numbering of the transitions of all draft shapes.

    ``bounds[t]`` is ``(num_nodes, depth)``: transition t goes from ``depth`` to ``depth + 1`` among
    the first ``num_nodes`` nodes. ``by_shape[s]`` are the transitions of shape s, by depth. A step
    of shape s measures the first ``num_visible[s]`` transitions: its own and the smaller shapes'.
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
        """Count attempts and successes of each transition that shape ``shape_index`` measures.

        Returns:
            The rows that reached the transition's start and may go deeper; the rows that did.
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
