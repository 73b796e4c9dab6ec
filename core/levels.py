"""How much a step drafts: levels, which a drafter states once and plans name by their numbers.
Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_NODES = 63
"""Drafts of a step: a mask of 64 bits says which of them each sees (model/network/tree.py)."""
MOST_LEVELS = 4
"""Of trees, beside none: all sizes of batches by all levels have to fit the programs that are kept
(decode_node/planning/forms.py)."""


@dataclass(frozen=True, slots=True)
class Level:
    """A tree of drafts, whose shape is static: nodes 1 .. ``num_nodes``, parents before children.
    Node 0 is the last known token. ``parents`` are those of nodes 1 .., None where each step
    decides on them; then, too, no node lies deeper than ``depth``. Who drafts it writes to
    ``num_used`` slots of its own caches, from the last known token's on."""

    num_nodes: int
    depth: int
    parents: tuple[int, ...] | None
    num_used: int = 0

    @property
    def num_slots(self) -> int:
        """That drafting or verifying writes, from the last token's on."""
        return max(self.num_nodes + 1, self.num_used)

    @property
    def is_chain(self) -> bool:
        return self.parents == (*range(self.num_nodes),)

    def nodes_within(self, depth: int) -> frozenset[int] | None:
        """Those that lie no deeper, None if that is not known."""
        if self.parents is None:
            return None
        depths = _depths(self.parents)[1:]
        return frozenset(node for node, its in enumerate(depths, start=1) if its <= depth)


Levels = tuple[Level, ...]
"""The first drafts nothing, and each is a prefix of the next: it has its first nodes."""


def chains(depth: int) -> Levels:
    """Of 0, 1 .. ``depth`` drafts, one behind the other."""
    return tuple(Level(n, n, (*range(n),)) for n in range(depth + 1))


def grown(num_nodes: int, depth: int, width: int = 0) -> Levels:
    """Of trees that each step decides on: nothing, then sizes that double up to ``num_nodes``. To
    find them ``width`` nodes of each depth but the last go into caches."""
    bounds = ((num, min(num, depth)) for num in _sizes(num_nodes))
    return chains(0) + tuple(Level(*one, None, width * (one[1] - 1)) for one in bounds)


def prefixes(parents: tuple[int, ...]) -> Levels:
    """Of a tree that is known: nothing, then so many of its first nodes, doubling."""
    many = (parents[:num] for num in _sizes(len(parents)))
    return chains(0) + tuple(Level(len(some), max(_depths(some)), some) for some in many)


def usable(levels: Levels, depth: int) -> int:
    """The highest that is of use where no path may go deeper: the first that goes as deep, and all
    that go no deeper."""
    return max(
        n for n, level in enumerate(levels) if level.depth <= depth or levels[n - 1].depth < depth
    )


def slots_ahead(levels: Levels) -> int:
    """Cache slots that two steps may need beyond the known tokens: one emits a path, the next
    writes a whole tree behind it."""
    return levels[-1].depth + max(level.num_slots for level in levels) + 1


def _sizes(num_nodes: int) -> list[int]:
    return sorted({max(1, num_nodes >> i) for i in range(MOST_LEVELS)})


def _depths(parents: Sequence[int]) -> list[int]:
    """Of all nodes, node 0 first."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths
