"""Expert dispatch: outputs equal those of one rank that holds all experts, wherever experts lie."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from tandem.core.placement import Placement
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import TORCH_KERNELS
from tandem.model.network.dispatch.all_gather import AllGatherDispatch
from tandem.model.network.dispatch.all_to_all import AllToAllDispatch
from tandem.model.network.dispatch.base import CollectiveGroup, Dispatch
from tandem.model.network.dispatch.expert_parallel import ExpertParallelDispatch
from tandem.model.network.experts import Experts
from tests.numerics import assert_near, rounding
from tests.ranks import CPU, on_ranks

LAYER, NUM_EXPERTS, TOP, DIM = 1, 8, 2, 48
CONFIG = ModelConfig.from_dict(tiny.BASE)
WAYS: dict[str, Callable[[Placement, int], ExpertParallelDispatch]] = {
    "all_gather": lambda placement, rank: AllGatherDispatch(placement, rank, CPU, is_static=False),
    "static": lambda placement, rank: AllGatherDispatch(placement, rank, CPU, is_static=True),
    "all_to_all": lambda placement, rank: AllToAllDispatch(placement, rank, CPU),
}


@dataclass
class Tokens:
    """Tokens of one rank. ``real_T`` marks the real ones (None: there is no padding)."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    real_T: Tensor | None = None

    def __post_init__(self) -> None:
        if self.real_T is not None:
            self.x_TD[~self.real_T] = float("nan")


def tokens(num: int, seed: int, num_real: int | None = None) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:TOP] for _ in range(num)])
    real = None if num_real is None else torch.arange(num) < num_real
    draw = torch.randn(num, DIM, generator=generator)
    return Tokens(draw, ids, torch.rand(num, TOP, generator=generator), real)


def all_experts() -> Experts:
    experts = Experts(CONFIG, tuple(range(NUM_EXPERTS)))
    generator = torch.Generator().manual_seed(7)
    for weight in (experts.gate_up.weight, experts.down.weight):
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return experts


def one_by_one(experts: Experts, told: Tokens) -> Tensor:
    """Compute a slow reference: every token through each of its experts, one at a time."""
    out_TD = torch.zeros_like(told.x_TD)
    for t, (ids_K, weights_K) in enumerate(zip(told.ids_TK, told.weights_TK, strict=True)):
        for expert, weight in zip(ids_K.tolist(), weights_K, strict=True):
            gate, up = (experts.gate_up.weight[expert] @ told.x_TD[t]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out_TD[t] += weight * (experts.down.weight[expert] @ hidden)
    return out_TD


def dispatched(
    way: str, placement: Placement, ranks: list[Tokens], kind: type[Experts] = Experts
) -> list[tuple[Tensor, ExpertParallelDispatch]]:
    """Return the combined outputs of each rank, and its dispatch, which has counted the rows."""
    whole = all_experts()

    def work(group: CollectiveGroup) -> tuple[Tensor, ExpertParallelDispatch]:
        dispatch = WAYS[way](placement, group.rank)
        dispatch.set_group(group)
        held = dispatch.local_experts(LAYER)
        experts = kind(CONFIG, held)
        experts.gate_up.weight.copy_(whole.gate_up.weight[list(held)])
        experts.down.weight.copy_(whole.down.weight[list(held)])
        experts.process_weights_after_loading(TORCH_KERNELS)
        own = ranks[group.rank]
        out = dispatch.run_experts(LAYER, experts, own.x_TD, own.ids_TK, own.real_T)
        return TORCH_KERNELS.combine(out, own.weights_TK, None), dispatch

    return on_ranks(placement.num_ranks, work)


def check(way: str, placement: Placement, ranks: list[Tokens]) -> None:
    whole, answers = all_experts(), dispatched(way, placement, ranks)
    for own, (out_TD, dispatch) in zip(ranks, answers, strict=True):
        real = slice(None) if own.real_T is None else own.real_T
        wanted_TD = one_by_one(whole, own)[real]
        length = 2 * (DIM + CONFIG.moe_intermediate_size)  # products and sums
        largest = float(wanted_TD.abs().max()) if len(wanted_TD) else 1.0
        assert_near(out_TD[real], wanted_TD, rounding(length, largest))
        assert out_TD.isfinite().all(), "padding is finite"
        counted = torch.bincount(own.ids_TK[real].flatten(), minlength=NUM_EXPERTS)
        assert dispatch.num_sent_rows() == [[0] * NUM_EXPERTS, counted.tolist()]
    sent = sum(sum(dispatch.num_sent_rows()[LAYER]) for _, dispatch in answers)
    assert sent == sum(dispatch.num_computed_rows()[LAYER] for _, dispatch in answers)


def plain(num_ranks: int, num_redundant: int = 0) -> Placement:
    return Placement.in_order(2, NUM_EXPERTS, num_ranks, num_redundant)


SHUFFLED = Placement(2, ((0, 1, 2, 3, 4, 5, 6, 7), (6, 1, 4, 3, 0, 7, 2, 5)))
REPLICAS = Placement(2, ((0, 1, 2, 3, 4, 5, 6, 7, 0, 1), (6, 1, 4, 3, 1, 0, 7, 1, 2, 5)))
"""Placement where expert 1 has two slots on one rank and one on the other."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "placement", [plain(2), plain(4), plain(4, 4), SHUFFLED, REPLICAS], ids=lambda p: p.num_slots
)
def test_outputs_are_those_of_all_experts_in_one_place(way: str, placement: Placement) -> None:
    check(way, placement, [tokens(9, seed=rank) for rank in range(placement.num_ranks)])


@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_poisoned_padding_and_ranks_with_nothing_else(way: str) -> None:
    check(way, plain(4), [tokens(6, rank, num_real) for rank, num_real in enumerate((6, 0, 1, 4))])
    check(way, plain(2), [tokens(3, rank, num_real=0) for rank in range(2)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placement", [plain(4), REPLICAS], ids=["plain", "replicas"])
def test_all_tokens_to_one_expert(way: str, placement: Placement) -> None:
    ranks = [tokens(7, seed=rank) for rank in range(placement.num_ranks)]
    for own in ranks:
        own.ids_TK = torch.tensor([[1, 0]]).repeat(7, 1)
    check(way, placement, ranks)


def test_ranks_may_bring_different_numbers_of_tokens_or_none() -> None:
    check("all_to_all", plain(4), [tokens(num, seed=num) for num in (1, 12, 5, 2)])
    nothing = Tokens(
        torch.empty(0, DIM), torch.empty(0, TOP, dtype=torch.int64), torch.empty(0, TOP)
    )
    check("all_to_all", plain(2), [nothing, tokens(3, seed=1)])
    check("all_to_all", plain(2), [nothing, nothing])


class Scaling(Experts):
    """Experts that only multiply, so that the output has the same bits in any batch."""

    def forward(
        self, x_ND: Tensor, tokens_P: Tensor | None, slots_P: Tensor, num_ranks: int = 1
    ) -> Tensor:
        share = int((slots_P < len(self.expert_ids)).sum()) / len(slots_P)
        ASKED.append((num_ranks, share))
        if tokens_P is None:
            tokens_P = torch.arange(len(slots_P)) // (len(slots_P) // len(x_ND))
        factors = torch.tensor([*(SIZES[expert] for expert in self.expert_ids), 0.0])
        return x_ND[tokens_P] * factors[slots_P].unsqueeze(1)


ASKED: list[tuple[int, float]] = []
"""For each call of experts: the number of ranks that was passed, and the share of local pairs."""
SIZES = [1e8, 3.0, -1e8, 0.7, 1e4, -7.0, 1e-3, 11.0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placement", [plain(2), plain(4), SHUFFLED, REPLICAS], ids=str)
def test_neither_ranks_nor_replicas_change_the_order_of_a_sum(
    way: str, placement: Placement
) -> None:
    """The outputs differ in size by many orders, so that any other order of a sum changes the
    result."""
    ranks = [tokens(16, seed) for seed in range(placement.num_ranks)]
    for own in ranks:
        own.ids_TK = torch.stack([torch.randperm(NUM_EXPERTS) for _ in range(16)])
        own.weights_TK = torch.rand(16, NUM_EXPERTS)
    everything = Scaling(CONFIG, tuple(range(NUM_EXPERTS)))
    for own, (out_TD, _) in zip(ranks, dispatched(way, placement, ranks, Scaling), strict=True):
        alone = Dispatch(NUM_EXPERTS).run_experts(LAYER, everything, own.x_TD, own.ids_TK, None)
        assert torch.equal(out_TD, TORCH_KERNELS.combine(alone, own.weights_TK, None))
        backwards = TORCH_KERNELS.combine(alone.flip(1), own.weights_TK.flip(1), None)
        assert not torch.equal(out_TD, backwards), "the order matters here"


@pytest.mark.parametrize("way", WAYS)
def test_experts_are_told_which_share_of_pairs_to_expect(way: str) -> None:
    """Experts receive the expected share of local pairs, by which kernels choose their tiles."""
    ASKED.clear()
    dispatched(way, plain(4), [tokens(64, seed) for seed in range(4)], Scaling)
    assert len(ASKED) >= 4
    assert all(abs(share * num_ranks - 1) < 0.25 for num_ranks, share in ASKED), ASKED


def test_copies_take_turns() -> None:
    dispatch = AllToAllDispatch(REPLICAS, 0, CPU)
    slots = dispatch.slots(LAYER, torch.full((9, 1), 1), None).flatten().tolist()
    assert sorted(slots) == [1] * 3 + [4] * 3 + [7] * 3
