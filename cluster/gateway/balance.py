"""How evenly the experts of each gang are used, from what its ranks tell."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from core.eplb import ratio_of_loads
from core.info import RankStatus


def with_balance(ranks: Sequence[RankStatus], gangs: Sequence[str]) -> list[RankStatus]:
    """Ranks, with the balance ratio of each one's gang; a gang of one has none."""
    loads: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for rank, gang in zip(ranks, gangs, strict=True):
        if rank.rows_by_layer:
            loads[gang].append(rank.rows_by_layer)
    ratios = {}
    for gang, loads_RL in loads.items():
        loads_LR = list(zip(*loads_RL, strict=True))
        ratios[gang] = ratio_of_loads(loads_LR, list(map(sum, loads_LR)))
    return [
        replace(rank, balance_ratio=ratios.get(gang, 0.0))
        for rank, gang in zip(ranks, gangs, strict=True)
    ]
