"""What a step tells of drafts: how far rows came, at each of its level and of every level below.

A rung is the step from one depth of a level to the next. Levels that have the same nodes down to
there share it, as all chains do. Plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.levels import Levels

Came = tuple[int, Sequence[int]]
"""Of a row: the most drafts that it may accept, and the nodes that it did, in order."""


@dataclass(frozen=True, slots=True)
class Rungs:
    """Rung r leads on from depth ``bounds[r][1]`` among the first ``bounds[r][0]`` nodes.
    ``of_level[l]`` are those of level l, by depth; it and those below have the first
    ``num_told[l]``."""

    bounds: tuple[tuple[int, int], ...]
    of_level: tuple[tuple[int, ...], ...]
    num_told: tuple[int, ...]

    @classmethod
    def of(cls, levels: Levels) -> "Rungs":
        known: dict[tuple[object, int], int] = {}
        bounds: list[tuple[int, int]] = []
        of_level, num_told = [], []
        for number, level in enumerate(levels):
            rungs = []
            for depth in range(level.depth):
                nodes = level.nodes_within(depth + 1)
                rungs.append(known.setdefault((nodes or number, depth), len(bounds)))
                if rungs[-1] == len(bounds):
                    bounds.append((level.num_nodes, depth))
            of_level.append((*rungs,))
            num_told.append(len(bounds))
        return cls((*bounds,), (*of_level,), (*num_told,))

    def count(self, level: int, rows: Sequence[Came]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By rung of this level and those below: rows that came to where it begins and may go on,
        and those of them that did."""
        told = self.bounds[: self.num_told[level]]
        tried = (sum(limit > k and _comes(path, n, k) for limit, path in rows) for n, k in told)
        accepted = (sum(_comes(path, n, k + 1) for _, path in rows) for n, k in told)
        return (*tried,), (*accepted,)


def _comes(path: Sequence[int], num_nodes: int, depth: int) -> bool:
    """Whether a path goes down to ``depth`` if there are but so many nodes."""
    return depth == 0 or (len(path) >= depth and path[depth - 1] <= num_nodes)
