"""Expert placement: the example of EPLB's README, and properties that hold for every load."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.eplb import balance_ratio, balanced_packing, rebalance, replicate_experts
from tandem.core.placement import Placement
from tandem.core.schema import pack, unpack

EXAMPLE_LE = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
"""Example of EPLB's README: 12 experts in 4 groups, 16 slots on 8 ranks of 2 machines."""

Case = tuple[list[list[int]], int, int, int, int]


@st.composite
def cases(draw: st.DrawFn, hierarchical: bool = False) -> Case:
    """Draw arguments of rebalance, with skewed counts, ties and zeros."""
    num_machines = draw(st.integers(2 if hierarchical else 1, 3))
    num_ranks = num_machines * draw(st.integers(1, 3))
    num_groups = draw(st.integers(1, 6))
    if hierarchical:
        num_groups = num_machines * draw(st.integers(1, 2))
    num_experts = num_groups * draw(st.integers(1, 4))
    least = -(-num_experts // num_ranks)
    num_slots = num_ranks * draw(st.integers(least, least + 3))
    count = st.integers(0, 4) | st.integers(0, 10**6).map(lambda x: x * x // 10**6)
    counts_E = st.lists(count, min_size=num_experts, max_size=num_experts)
    counts_LE = draw(st.lists(counts_E, min_size=1, max_size=3))
    return counts_LE, num_slots, num_groups, num_machines, num_ranks


def loads_of(counts_E: list[int], placement: Placement, layer: int) -> list[list[Fraction]]:
    """Return the loads of each rank's slots, independently of the code under test."""
    copies = Counter(placement.slot_experts[layer])
    return [
        [Fraction(counts_E[e], copies[e]) for e in placement.experts_of_rank(layer, rank)]
        for rank in range(placement.num_ranks)
    ]


def heaviest_slot(counts_E: list[int], placement: Placement, layer: int) -> Fraction:
    return max(max(loads) for loads in loads_of(counts_E, placement, layer))


def test_the_example_of_eplb() -> None:
    placement = rebalance(EXAMPLE_LE, num_slots=16, num_groups=4, num_machines=2, num_ranks=8)
    assert placement.slot_experts == (
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
    )


@given(cases())
def test_every_expert_has_a_slot_and_ranks_have_equally_many(case: Case) -> None:
    counts_LE, num_slots, *_, num_ranks = case
    placement = rebalance(*case)
    placement.check_integrity(len(counts_LE[0]))
    assert (placement.num_slots, placement.num_ranks) == (num_slots, num_ranks)
    assert len(placement.slot_experts) == len(counts_LE)
    ranks = [placement.experts_of_rank(0, rank) for rank in range(num_ranks)]
    assert {len(experts) for experts in ranks} == {num_slots // num_ranks}
    assert 0 < balance_ratio(counts_LE, placement) <= 1


@given(cases(hierarchical=True))
def test_a_group_stays_on_one_machine_and_machines_have_equally_many(case: Case) -> None:
    counts_LE, num_slots, num_groups, num_machines, _ = case
    group_size, per_machine = len(counts_LE[0]) // num_groups, num_slots // num_machines
    for experts_S in rebalance(*case).slot_experts:
        seats = {(e // group_size, slot // per_machine) for slot, e in enumerate(experts_S)}
        assert len(seats) == num_groups
        assert set(Counter(m for _, m in seats).values()) == {num_groups // num_machines}


@given(cases())
def test_ranks_of_a_machine_differ_by_at_most_the_heaviest_slot(case: Case) -> None:
    """The greedy packing guarantees no more: the next test has a case worse than the plain
    placement."""
    counts_LE, _, num_groups, num_machines, num_ranks = case
    placement = rebalance(*case)
    width = num_ranks if num_groups % num_machines else num_ranks // num_machines
    for layer, counts_E in enumerate(counts_LE):
        ranks = loads_of(counts_E, placement, layer)
        for first in range(0, num_ranks, width):
            machine = ranks[first : first + width]
            sums = [sum(loads) for loads in machine]
            assert max(sums) - min(sums) <= max(map(max, machine))


def test_greedy_packing_may_be_worse_than_the_plain_placement() -> None:
    counts_LE = [[3, 3, 0, 2, 2, 2]]
    assert balance_ratio(counts_LE, Placement.in_order(1, 6, 2)) == 1.0
    assert balance_ratio(counts_LE, rebalance(counts_LE, 6, 1, 1, 2)) == 6 / 7


@given(cases())
def test_more_slots_never_make_the_heaviest_heavier(case: Case) -> None:
    counts_LE, num_slots, *topology = case
    few = rebalance(counts_LE, num_slots, *topology)
    many = rebalance(counts_LE, num_slots + few.num_ranks, *topology)
    for layer, counts_E in enumerate(counts_LE):
        most = heaviest_slot(counts_E, many, layer)
        assert most <= heaviest_slot(counts_E, few, layer) <= max(counts_E)


@given(cases(), st.data())
def test_no_other_replication_has_a_lighter_heaviest_slot(case: Case, data: st.DataObject) -> None:
    """Compare with random replications on one machine, and with the plain placement."""
    (counts_E, *_), num_slots, *_, num_ranks = case
    best = heaviest_slot(counts_E, rebalance([counts_E], num_slots, 1, 1, num_ranks), 0)
    num_experts, num_redundant = len(counts_E), num_slots - len(counts_E)
    plain = Placement.in_order(1, num_experts, num_ranks, num_redundant)
    experts = st.integers(0, num_experts - 1)
    more = data.draw(st.lists(experts, min_size=num_redundant, max_size=num_redundant))
    other = Placement(num_ranks, ((*range(num_experts), *more),))
    assert best <= min(heaviest_slot(counts_E, one, 0) for one in (plain, other))


@given(cases(), st.integers(1, 10**6))
def test_equal_counts_give_equal_layers_whatever_their_scale(case: Case, scale: int) -> None:
    counts_LE, *sizes = case
    placement = rebalance(*case)
    scaled = [[count * scale for count in counts_E] for counts_E in counts_LE]
    alone = [rebalance([counts_E], *sizes).slot_experts[0] for counts_E in scaled]
    assert rebalance(*case) == placement == Placement(placement.num_ranks, tuple(alone))
    assert balance_ratio(scaled, placement) == pytest.approx(balance_ratio(counts_LE, placement))


@given(cases())
def test_groups_do_not_count_where_machines_cannot_share_them(case: Case) -> None:
    counts_LE, num_slots, num_groups, num_machines, num_ranks = case
    ungrouped = rebalance(counts_LE, num_slots, 1, 1, num_ranks)
    assert rebalance(counts_LE, num_slots, num_groups, 1, num_ranks) == ungrouped
    if num_groups % num_machines:
        assert rebalance(*case) == ungrouped


def test_the_ratio_by_hand() -> None:
    plain = Placement.in_order(2, num_experts=3, num_ranks=2, num_redundant=1)
    assert plain.slot_experts[0] == (0, 1, 2, 0)
    # Ranks get 4 + 0 and 1 + 4 rows, then 0 and 3: 4.5 / 5 of 9 rows and 1.5 / 3 of 3 rows.
    assert balance_ratio([[8, 0, 1], [0, 0, 3]], plain) == pytest.approx((9 * 0.9 + 3 * 0.5) / 12)
    assert balance_ratio([[8, 0, 1], [0, 0, 0]], plain) == pytest.approx(0.9)


def test_all_rows_to_one_expert_give_it_all_redundant_slots() -> None:
    counts_LE = [[0, 0, 100, 0]]
    placement = rebalance(counts_LE, 8, 1, 1, 4)
    assert [len(slots) for slots in placement.expert_slots(0)] == [1, 1, 5, 1]
    assert balance_ratio(counts_LE, placement) == pytest.approx((100 / 4) / (100 * 2 / 5))
    assert balance_ratio(counts_LE, Placement.in_order(1, 4, 4)) == 0.25


@pytest.mark.parametrize(("num_groups", "num_machines"), [(1, 1), (2, 2)])
def test_without_rows_redundant_slots_are_spread(num_groups: int, num_machines: int) -> None:
    placement = rebalance([[0] * 4], 8, num_groups, num_machines, 4)
    assert [len(slots) for slots in placement.expert_slots(0)] == [2, 2, 2, 2]
    assert balance_ratio([[0] * 4], placement) == 1.0


@given(cases())
def test_without_redundancy_it_is_a_permutation(case: Case) -> None:
    counts_LE, _, *topology = case
    many_LE = [counts_E * topology[-1] for counts_E in counts_LE]
    placement = rebalance(many_LE, len(many_LE[0]), *topology)
    assert all(sorted(row) == list(range(len(many_LE[0]))) for row in placement.slot_experts)


def test_a_single_rank_has_everything() -> None:
    placement = rebalance([[1, 5, 2]], num_slots=4, num_groups=3, num_machines=1, num_ranks=1)
    assert sorted(placement.experts_of_rank(0, 0)) == [0, 1, 1, 2]
    assert balance_ratio([[1, 5, 2]], placement) == 1.0


def test_ties_go_to_the_lowest_number() -> None:
    assert replicate_experts([4, 4, 2], 6) == [0, 1, 2, 0, 1, 0]
    assert balanced_packing([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]
    assert balanced_packing([1, 3, 2], 3) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            (6, 2, 1, 4),
            "dp_size=4: must divide .* = 4 [+] 2; set num_redundant_experts=4 or use another",
        ),
        ((3, 2, 1, 1), "num_redundant_experts=-1: set it to 0 or more"),
        ((6, 2, 2, 3), "dp_size=3 on 2 machines.* set dp_size to a multiple of 2"),
    ],
)
def test_wrong_sizes_are_named(sizes: tuple[int, int, int, int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        rebalance([[1, 2, 3, 4]], *sizes)


def test_plain_placement() -> None:
    placement = Placement.in_order(2, num_experts=6, num_ranks=4, num_redundant=2)
    assert placement.slot_experts == ((0, 1, 2, 3, 4, 5, 0, 1),) * 2
    assert (placement.num_slots, placement.slots_per_rank) == (8, 2)
    assert [placement.experts_of_rank(1, rank) for rank in range(4)] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (0, 1),
    ]
    assert placement.expert_slots(0) == ((0, 6), (1, 7), (2,), (3,), (4,), (5,))
    placement.check_integrity(6)
    with pytest.raises(
        ValueError, match="n_routed_experts .* 6 [+] 0; set num_redundant_experts=2"
    ):
        Placement.in_order(2, num_experts=6, num_ranks=4)
    with pytest.raises(ValueError, match="num_redundant_experts=-2"):
        Placement.in_order(2, num_experts=6, num_ranks=4, num_redundant=-2)


@pytest.mark.parametrize(
    "placement",
    [
        Placement(2, ((0, 1, 1, 0),)),
        Placement(2, ((0, 1, 2, 3),)),
        Placement(2, ((0, 1, 2, 0), (0, 1, 2, 0, 1, 2))),
        Placement(3, ((0, 1, 2, 0),)),
        Placement(2, ()),
    ],
)
def test_integrity_is_checked(placement: Placement) -> None:
    with pytest.raises(AssertionError):
        placement.check_integrity(3)


def test_placements_survive_the_trip() -> None:
    placement = rebalance(EXAMPLE_LE, 16, 4, 2, 8)
    assert unpack(Placement, pack(placement)) == placement


def test_the_size_of_v3_is_balanced_better_than_plainly() -> None:
    generator = random.Random(1)
    counts_LE = [[int(generator.paretovariate(1.2) * 100) for _ in range(256)] for _ in range(58)]
    placement = rebalance(counts_LE, num_slots=288, num_groups=8, num_machines=4, num_ranks=32)
    plain = Placement.in_order(58, 256, 32, 32)
    assert balance_ratio(counts_LE, placement) > balance_ratio(counts_LE, plain)
