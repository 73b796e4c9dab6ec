"""How evenly the experts of each gang are used, from the heartbeats of its ranks."""

from collections import defaultdict
from collections.abc import Iterable

from tandem.cluster.gateway.handles import Handle
from tandem.core.eplb import ratio_of_loads


def balance_ratios(ranks: Iterable[Handle]) -> dict[str, float]:
    """Return the balance ratio of each gang by its name, as of the ranks' last heartbeats; a gang
    of one rank has none."""
    loads: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for rank in ranks:
        if rank.beat is not None and rank.beat.held.rows_by_layer:
            loads[rank.info.spec.gang].append(rank.beat.held.rows_by_layer)
    ratios = {}
    for gang, loads_RL in loads.items():
        loads_LR = list(zip(*loads_RL, strict=True))
        ratios[gang] = ratio_of_loads(loads_LR, list(map(sum, loads_LR)))
    return ratios
