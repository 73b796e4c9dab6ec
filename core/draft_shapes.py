"""Draft shapes: how many drafts a step has and how they are connected. Plain Python.

A drafter lists its shapes once. Plans refer to a shape by its index.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NODES = 63
"""Maximum drafts per step: one ancestor mask has 64 bits (model/network/tree.py)."""
MAX_TREE_SHAPES = 4
"""Maximum number of tree shapes besides the empty one.

Bounded because a program is kept for each combination of batch size and shape
(decode_node/planning/program_table.py).
"""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Tree or chain of drafts whose size is fixed in advance.

    Nodes are numbered 1 to ``num_nodes``, parents before children. Node 0 is the last known token
    of the sequence.

    Attributes:
        depth: Maximum depth of a node.
        parents: Parents of nodes 1, 2, ...; None if each step chooses them.
        num_draft_slots: Slots of the drafter's own caches that drafting writes, counted from the
            last known token.
    """

    num_nodes: int
    depth: int
    parents: tuple[int, ...] | None
    num_draft_slots: int = 0

    @property
    def num_slots(self) -> int:
        """Cache slots that drafting or verification writes, counted from the last known token."""
        return max(self.num_nodes + 1, self.num_draft_slots)

    @property
    def is_chain(self) -> bool:
        return self.parents == (*range(self.num_nodes),)

    def nodes_up_to_depth(self, depth: int) -> frozenset[int] | None:
        """Return the nodes with at most this depth; None if each step chooses the parents."""
        if self.parents is None:
            return None
        depths = _depths(self.parents)[1:]
        return frozenset(node for node, its in enumerate(depths, start=1) if its <= depth)


DraftShapes = tuple[DraftShape, ...]
"""Shapes in ascending order: the first drafts nothing, and each is a prefix of the next."""


def chain_shapes(depth: int) -> DraftShapes:
    """Return chains of 0, 1, ... ``depth`` drafts."""
    return tuple(DraftShape(n, n, (*range(n),)) for n in range(depth + 1))


def dynamic_tree_shapes(num_nodes: int, depth: int, width: int = 0) -> DraftShapes:
    """Return shapes of trees whose parents each step chooses: an empty one, then larger ones.

    Sizes double up to ``num_nodes``. While the drafter searches for the best tree, it writes
    ``width`` nodes of each depth except the last to its caches.
    """
    bounds = ((num, min(num, depth)) for num in _sizes(num_nodes))
    return chain_shapes(0) + tuple(
        DraftShape(*bound, None, width * (bound[1] - 1)) for bound in bounds
    )


def static_tree_shapes(parents: tuple[int, ...]) -> DraftShapes:
    """Return shapes of a fixed tree: an empty one, then prefixes of its nodes of doubling size.

    ``parents`` holds the parents of nodes 1, 2, ...
    """
    many = (parents[:num] for num in _sizes(len(parents)))
    return chain_shapes(0) + tuple(DraftShape(len(some), max(_depths(some)), some) for some in many)


def max_usable_shape(shapes: DraftShapes, depth: int) -> int:
    """Return the index of the largest shape that is useful if draft paths are limited to ``depth``.

    A shape is useful if it is no deeper than ``depth``, or if the next smaller shape is shallower
    than ``depth``.
    """
    return max(
        n for n, shape in enumerate(shapes) if shape.depth <= depth or shapes[n - 1].depth < depth
    )


def num_slots_ahead(shapes: DraftShapes) -> int:
    """Return the number of cache slots that two steps may need beyond the known tokens.

    The first step may accept a path of full depth, after which the second step writes a whole tree.
    """
    return shapes[-1].depth + max(shape.num_slots for shape in shapes) + 1


def _sizes(num_nodes: int) -> list[int]:
    return sorted({max(1, num_nodes >> i) for i in range(MAX_TREE_SHAPES)})


def _depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node, node 0 first."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths
