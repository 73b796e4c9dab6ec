"""Draft shapes: how many drafts a step has and how they are connected. Plain Python.

A drafter lists its shapes once. Plans refer to a shape by its index.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NODES = 63
"""Maximum drafts per step: one ancestor mask has 64 bits (model/network/tree.py)."""
MAX_TREE_SHAPES = 4
"""Maximum number of tree shapes besides the empty one.

Bounded because programs are kept for all batch sizes times all shapes
(decode_node/planning/program_table.py).
"""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A tree of drafts with a static shape.

    Nodes are numbered 1 to ``num_nodes``, parents before children. Node 0 is the last known token.

    Attributes:
        depth: Maximum depth of a node.
        parents: Parents of nodes 1, 2, ...; None if each step chooses them.
        num_draft_slots: Slots of its own caches that the drafter writes, from the last known token
            on.
    """

    num_nodes: int
    depth: int
    parents: tuple[int, ...] | None
    num_draft_slots: int = 0

    @property
    def num_slots(self) -> int:
        """Number of slots that drafting or verifying writes, from the last known token on."""
        return max(self.num_nodes + 1, self.num_draft_slots)

    @property
    def is_chain(self) -> bool:
        return self.parents == (*range(self.num_nodes),)

    def nodes_up_to_depth(self, depth: int) -> frozenset[int] | None:
        """Return the nodes with at most this depth, None if parents are chosen per step."""
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
    """Return shapes of dynamic trees: an empty one, then sizes that double up to ``num_nodes``.

    Each step chooses the parents. The search writes ``width`` nodes of each depth except the last
    to caches.
    """
    bounds = ((num, min(num, depth)) for num in _sizes(num_nodes))
    return chain_shapes(0) + tuple(
        DraftShape(*bound, None, width * (bound[1] - 1)) for bound in bounds
    )


def static_tree_shapes(parents: tuple[int, ...]) -> DraftShapes:
    """Return shapes of a known tree: empty, then prefixes of its nodes, doubling in size."""
    many = (parents[:num] for num in _sizes(len(parents)))
    return chain_shapes(0) + tuple(DraftShape(len(some), max(_depths(some)), some) for some in many)


def max_usable_shape(shapes: DraftShapes, depth: int) -> int:
    """Return the index of the largest useful shape if paths are limited to ``depth``.

    Useful are all shapes of at most this depth, and the first shape that reaches it.
    """
    return max(
        n for n, shape in enumerate(shapes) if shape.depth <= depth or shapes[n - 1].depth < depth
    )


def num_slots_ahead(shapes: DraftShapes) -> int:
    """Return the number of cache slots that two steps may need beyond the known tokens.

    One step emits a path, and the next writes a whole tree after it.
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
