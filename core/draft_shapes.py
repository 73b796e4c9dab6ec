"""How much a step drafts: levels, which a drafter states once and plans name by their numbers.
Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NODES = 63
"""Drafts of a step: a mask of 64 bits says which of them each sees (model/network/tree.py)."""
MAX_TREE_SHAPES = 4
"""Of trees, beside none: all sizes of batches by all levels have to fit the programs that are kept
(decode_node/planning/program_table.py)."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A tree of drafts, whose shape is static: nodes 1 .. ``num_nodes``, parents before children.
    Node 0 is the last known token. ``parents`` are those of nodes 1 .., None where each step
    decides on them; then, too, no node lies deeper than ``depth``. Who drafts it writes to
    ``num_draft_slots`` slots of its own caches, from the last known token's on."""

    num_nodes: int
    depth: int
    parents: tuple[int, ...] | None
    num_draft_slots: int = 0

    @property
    def num_slots(self) -> int:
        """That drafting or verifying writes, from the last token's on."""
        return max(self.num_nodes + 1, self.num_draft_slots)

    @property
    def is_chain(self) -> bool:
        return self.parents == (*range(self.num_nodes),)

    def nodes_up_to_depth(self, depth: int) -> frozenset[int] | None:
        """Those that lie no deeper, None if that is not known."""
        if self.parents is None:
            return None
        depths = _depths(self.parents)[1:]
        return frozenset(node for node, its in enumerate(depths, start=1) if its <= depth)


DraftShapes = tuple[DraftShape, ...]
"""The first drafts nothing, and each is a prefix of the next: it has its first nodes."""


def chain_shapes(depth: int) -> DraftShapes:
    """Of 0, 1 .. ``depth`` drafts, one behind the other."""
    return tuple(DraftShape(n, n, (*range(n),)) for n in range(depth + 1))


def dynamic_tree_shapes(num_nodes: int, depth: int, width: int = 0) -> DraftShapes:
    """Of trees that each step decides on: nothing, then sizes that double up to ``num_nodes``. To
    find them ``width`` nodes of each depth but the last go into caches."""
    bounds = ((num, min(num, depth)) for num in _sizes(num_nodes))
    return chain_shapes(0) + tuple(DraftShape(*one, None, width * (one[1] - 1)) for one in bounds)


def static_tree_shapes(parents: tuple[int, ...]) -> DraftShapes:
    """Of a tree that is known: nothing, then so many of its first nodes, doubling."""
    many = (parents[:num] for num in _sizes(len(parents)))
    return chain_shapes(0) + tuple(DraftShape(len(some), max(_depths(some)), some) for some in many)


def max_usable_shape(shapes: DraftShapes, depth: int) -> int:
    """The highest that is of use where no path may go deeper: the first that goes as deep, and all
    that go no deeper."""
    return max(
        n for n, shape in enumerate(shapes) if shape.depth <= depth or shapes[n - 1].depth < depth
    )


def num_slots_ahead(shapes: DraftShapes) -> int:
    """Cache slots that two steps may need beyond the known tokens: one emits a path, the next
    writes a whole tree behind it."""
    return shapes[-1].depth + max(shape.num_slots for shape in shapes) + 1


def _sizes(num_nodes: int) -> list[int]:
    return sorted({max(1, num_nodes >> i) for i in range(MAX_TREE_SHAPES)})


def _depths(parents: Sequence[int]) -> list[int]:
    """Of all nodes, node 0 first."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths
