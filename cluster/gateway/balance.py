"""Balance of expert load over the ranks of each gang, computed from heartbeats."""

from collections import defaultdict
from collections.abc import Iterable

from tandem.cluster.gateway.handles import RankHandle
from tandem.core.eplb import ratio_of_loads


def balance_ratios(ranks: Iterable[RankHandle]) -> dict[str, float]:
    """Return the balance ratio of each gang by name, from the ranks' latest heartbeats.

    Gangs of one rank have no ratio.
    """
    loads: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for rank in ranks:
        if rank.heartbeat is not None and rank.heartbeat.load.rows_by_layer:
            loads[rank.info.spec.gang].append(rank.heartbeat.load.rows_by_layer)
    ratios = {}
    for gang, loads_RL in loads.items():
        loads_LR = list(zip(*loads_RL, strict=True))
        ratios[gang] = ratio_of_loads(loads_LR, list(map(sum, loads_LR)))
    return ratios
