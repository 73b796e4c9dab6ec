"""Expert balance: replicate heavily used experts and spread rows evenly over the ranks.

An implementation of DeepSeek's Expert Parallelism Load Balancer from its description
(github.com/deepseek-ai/EPLB, MIT licence; redundant experts: arXiv 2412.19437). Ties are resolved
by the lower number and loads are compared exactly. Equal counts therefore give equal placements,
and so do counts multiplied by a common factor.

Legend: L MoE layers, E routed experts, G groups of experts, S slots, I items to pack. Counts are
numbers of rows, below 2**40. A token is one row for each expert to which it is routed.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import lcm

from tandem.core.placement import Placement, check_sizes


def rebalance(
    counts_LE: Sequence[Sequence[int]],
    num_slots: int,
    num_groups: int,
    num_machines: int,
    num_ranks: int,
) -> Placement:
    """Return a placement that balances the rows of ``counts_LE``, each layer independently.

    If the machines can share the expert groups evenly, all replicas of a group are on one machine
    (EPLB's hierarchical policy). Otherwise, and on one machine, groups are ignored (global policy).

    Args:
        counts_LE: Number of rows of each expert.
        num_slots: Slots per layer on all ranks together.
        num_groups: The checkpoint's n_group.
        num_machines: Number of machines. All have the same number of ranks, in the order of ranks.
        num_ranks: Number of ranks.

    Raises:
        ValueError: The slots cannot be divided evenly among the ranks, or the ranks among the
            machines.
    """
    num_experts = len(counts_LE[0])
    assert all(len(counts_E) == num_experts and min(counts_E) >= 0 for counts_E in counts_LE)
    check_sizes(num_experts, num_slots - num_experts, num_ranks)
    if num_ranks % num_machines:
        raise ValueError(
            f"dp_size={num_ranks} on {num_machines} machines: each machine must have the same "
            f"number of ranks; set dp_size to a multiple of {num_machines}"
        )
    if num_groups % num_machines:
        num_groups = num_machines = 1
    assert num_experts % num_groups == 0, (num_experts, num_groups)
    return Placement(
        num_ranks,
        tuple(
            _rebalance_layer(
                counts_E=counts_E,
                num_slots=num_slots,
                num_groups=num_groups,
                num_machines=num_machines,
                num_ranks=num_ranks,
            )
            for counts_E in counts_LE
        ),
    )


def _rebalance_layer(
    counts_E: Sequence[int], num_slots: int, num_groups: int, num_machines: int, num_ranks: int
) -> tuple[int, ...]:
    """Return the expert in each slot of one layer, [S]. Each expert group is on one machine."""
    size = len(counts_E) // num_groups
    loads_G = [sum(counts_E[group * size : (group + 1) * size]) for group in range(num_groups)]
    experts_S: list[int] = []
    for groups in balanced_packing(loads_G, num_machines):
        ids = [group * size + i for group in sorted(groups) for i in range(size)]
        counts = [counts_E[expert] for expert in ids]
        filled = _fill_machine(counts, num_slots // num_machines, num_ranks // num_machines)
        experts_S += [ids[i] for i in filled]
    return tuple(experts_S)


def _fill_machine(counts_E: Sequence[int], num_slots: int, num_ranks: int) -> list[int]:
    """Return the expert in each slot of one machine, [S]. Experts are numbered per machine."""
    if not any(counts_E):  # EPLB itself would give all redundant slots to one expert.
        counts_E = [1] * len(counts_E)
    experts_S = replicate_experts(counts_E, num_slots)
    ranks = balanced_packing(slot_loads(counts_E, experts_S), num_ranks)
    return [experts_S[slot] for slots in ranks for slot in slots]


def balanced_packing(loads_I: Sequence[int], num_packs: int) -> list[list[int]]:
    """Return the items of each pack, the heaviest first. All packs have the same number of items.

    The algorithm is greedy: the heaviest remaining item goes to the lightest pack that is not full.
    Two packs therefore differ by at most the heaviest item. With one item per pack, pack i gets
    item i.
    """
    per_pack, rest = divmod(len(loads_I), num_packs)
    assert rest == 0, (len(loads_I), num_packs)
    if per_pack == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    lightest = [(0, pack) for pack in range(num_packs)]
    for item in sorted(range(len(loads_I)), key=loads_I.__getitem__, reverse=True):
        load, pack = heappop(lightest)
        packs[pack].append(item)
        if len(packs[pack]) < per_pack:
            heappush(lightest, (load + loads_I[item], pack))
    return packs


def replicate_experts(counts_E: Sequence[int], num_slots: int) -> list[int]:
    """Return the expert of each slot, [S]: all experts in order, then the redundant ones.

    Each redundant slot goes to the expert with the most rows per slot so far. No other assignment
    has a lower maximum number of rows per slot.
    """
    experts_S = list(range(len(counts_E)))
    copies_E = [1] * len(counts_E)
    heaviest: list[tuple[float, int]] = [(-count, e) for e, count in enumerate(counts_E)]
    heapify(heaviest)
    for _ in range(num_slots - len(counts_E)):
        _, expert = heaviest[0]
        copies_E[expert] += 1
        heapreplace(heaviest, (-counts_E[expert] / copies_E[expert], expert))
        experts_S.append(expert)
    return experts_S


def slot_loads(counts_E: Sequence[int], experts_S: Sequence[int]) -> list[int]:
    """Return the load of each slot, [S], with the rows of an expert spread evenly over its slots.

    The unit is a fraction of a row, chosen such that every load is an integer. Sums are therefore
    exact.
    """
    copies = Counter(experts_S)
    fractions = lcm(*copies.values())
    return [counts_E[expert] * (fractions // copies[expert]) for expert in experts_S]


def balance_ratio(counts_LE: Sequence[Sequence[int]], placement: Placement) -> float:
    """Return how evenly ``placement`` spreads the rows of ``counts_LE`` over the ranks, in (0, 1].

    The ratio of a layer is the mean load of the ranks divided by the maximum load. Rows of an
    expert with several slots are spread evenly over them. The result is the mean over layers,
    weighted by their rows. It is 1.0 for perfect balance or no rows, and 1 / num_ranks if one rank
    has all rows.
    """
    assert len(counts_LE) == len(placement.slot_experts)
    num = placement.slots_per_rank
    loads_LS = map(slot_loads, counts_LE, placement.slot_experts)
    loads_LR = [
        [sum(loads_S[start : start + num]) for start in range(0, len(loads_S), num)]
        for loads_S in loads_LS
    ]
    return ratio_of_loads(loads_LR, [sum(counts_E) for counts_E in counts_LE])


def ratio_of_loads(loads_LR: Sequence[Sequence[int]], rows_L: Sequence[int]) -> float:
    """Return how evenly rows are spread over the ranks, in (0, 1], as ``balance_ratio`` does.

    Args:
        loads_LR: Load of each rank in each layer, in any unit.
        rows_L: Number of rows of each layer, its weight in the mean.
    """
    weighted = (
        rows * (sum(loads_R) / (len(loads_R) * max(loads_R)))
        for loads_R, rows in zip(loads_LR, rows_L, strict=True)
        if rows
    )
    return sum(weighted) / sum(rows_L) if any(rows_L) else 1.0
