"""Prefill packs all chunks of a step into one row. Chunks do not see each other, and padding has no
effect. With native kernels, a token has the same bits in any chunk."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import POISON, Bench, greedy, load
from tandem.core.identity import Identity
from tandem.model.drafters.base import UNKNOWN_TOKEN
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Segment, pack_segments
from tandem.model.network.cache import MAIN, MTP, Caches
from tandem.prefill_node.planner import max_num_tokens
from tandem.runtime.lockstep import LocalPlanner, Plan

CPU = torch.device("cpu")
PAGE_SIZE = 4
TABLES = [[3, 8, 1, 6], [2, 9, 5], [7, 4]]
DRAFT_LENGTH_POLICIES = [(9, 14), (0, 11), (4, 5)]
"""Tokens [lo, hi) of each sequence that the step computes."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("packing")
    tiny.write_tiny(folder, seed=21)
    return load(folder, "model.kernels=native")


def ids_of(sequence: int) -> list[int]:
    generator = torch.Generator().manual_seed(sequence)
    return torch.randint(5, 90, (DRAFT_LENGTH_POLICIES[sequence][1],), generator=generator).tolist()


def segment(sequence: int, lo: int, hi: int) -> Segment:
    return Segment(ids_of(sequence)[lo:hi], lo, TABLES[sequence])


def caches_before(loaded: LoadedModel, poison: float = 0.0) -> Caches:
    """Return caches to which earlier steps have written each sequence, one at a time."""
    caches = loaded.allocate_caches(10, PAGE_SIZE)
    for cache in caches[MAIN] + caches[MTP]:
        cache[0] = poison
    for sequence, (lo, _) in enumerate(DRAFT_LENGTH_POLICIES):
        if lo > 0:
            loaded.network(pack_segments([segment(sequence, 0, lo)], PAGE_SIZE, CPU), caches)
    return caches


def packed(loaded: LoadedModel, caches: Caches, num_rows: int = 0) -> Tensor:
    """Return the hidden states [T, D] of all sequences' tokens, computed in one forward pass."""
    segments = [segment(i, lo, hi) for i, (lo, hi) in enumerate(DRAFT_LENGTH_POLICIES)]
    return loaded.network(pack_segments(segments, PAGE_SIZE, CPU, num_rows), caches)[0]


@torch.inference_mode()
def test_segments_do_not_see_each_other(loaded: LoadedModel) -> None:
    alone_caches, packed_caches = caches_before(loaded), caches_before(loaded)
    alone = [
        loaded.network(pack_segments([segment(i, lo, hi)], PAGE_SIZE, CPU), alone_caches)[0]
        for i, (lo, hi) in enumerate(DRAFT_LENGTH_POLICIES)
    ]
    assert torch.equal(packed(loaded, packed_caches), torch.cat(alone))
    for one, other in zip(alone_caches[MAIN], packed_caches[MAIN], strict=True):
        assert torch.equal(one[1:], other[1:])


@torch.inference_mode()
def test_padding_writes_to_the_dummy_page_and_changes_nothing(loaded: LoadedModel) -> None:
    plain_caches = caches_before(loaded)
    plain = packed(loaded, plain_caches)
    for poison in (POISON, -POISON):
        caches = caches_before(loaded, poison)
        padded = packed(loaded, caches, 32)
        assert torch.equal(padded[: len(plain)], plain)
        assert padded.isfinite().all()
        for one, other in zip(plain_caches[MAIN], caches[MAIN], strict=True):
            assert torch.equal(one[1:], other[1:])


def test_rows_that_only_fill_up_are_marked() -> None:
    segments = [segment(1, 0, 11), segment(2, 4, 5)]
    assert pack_segments(segments, PAGE_SIZE, CPU).real_BQ is None
    batch = pack_segments(segments, PAGE_SIZE, CPU, 16)
    assert batch.real_BQ is not None and batch.real_BQ.tolist() == [[True] * 12 + [False] * 4]
    assert (batch.write_slots_BQ[0, 12:] < PAGE_SIZE).all()


@torch.inference_mode()
def test_a_draft_row_without_its_token_leaves_no_trace(loaded: LoadedModel) -> None:
    """The other draft rows equal those of a step that knew all tokens."""
    batch = pack_segments([segment(1, 0, 11), segment(2, 0, 5)], PAGE_SIZE, CPU)
    known, unknown = caches_before(loaded), caches_before(loaded)
    hidden = loaded.network(batch, known)
    loaded.drafter.prefill(batch, torch.tensor([[17], [18]]), hidden, known)
    loaded.drafter.prefill(batch, torch.tensor([[17], [UNKNOWN_TOKEN]]), hidden, unknown)
    slot = (TABLES[2][1], 0)
    assert known[MTP][0][slot].any() and not unknown[MTP][0][slot].any()
    unknown[MTP][0][slot] = known[MTP][0][slot]
    assert torch.equal(known[MTP][0][1:], unknown[MTP][0][1:])


class Counted:
    """A network that counts its forward passes and heads."""

    def __init__(self, network: object) -> None:
        self._network = network
        self.forwards: list[int] = []
        self.heads: list[int] = []

    def forward_with_taps(self, batch, *rest):  # type: ignore[no-untyped-def]
        self.forwards.append(batch.token_ids_BQ.numel())
        return self._network.forward_with_taps(batch, *rest)  # type: ignore[attr-defined]

    def logits(self, hidden):  # type: ignore[no-untyped-def]
        self.heads.append(len(hidden))
        return self._network.logits(hidden)  # type: ignore[attr-defined]


def test_a_step_is_one_forward_and_one_head_over_real_tokens(loaded: LoadedModel) -> None:
    """Requests use sampling, penalties and log probabilities. Each answer equals that of its prompt
    alone."""
    asked = [
        greedy("a", ids_of(0), 4, logprobs=2),
        greedy("b", ids_of(1), 4, repetition_penalty=1.5),
        greedy("c", ids_of(2), 4, temperature=1.0),
        greedy("d", ids_of(1)[:3], 4, logprobs=0),
    ]
    network = Counted(loaded.network)
    together = Bench(replace(loaded, network=network))
    for request in asked:
        together.prefill.scheduler.admit(Identity(request.request_id), request)
    together.prefill.step()
    assert network.forwards == [14 + 11 + 5 + 3] and network.heads == [4]
    assert not together.prefill.has_work()
    told = {progress.sequence.request.request_id: progress for progress in together.progress}
    for request in asked:
        progress, alone = told[request.request_id], Bench(loaded)
        first, _ = alone.start(request)
        assert progress.first_token == first
        assert len(progress.logprobs) == (request.sampling.logprobs is not None)
        for one, other in zip(progress.logprobs, alone.progress[-1].logprobs, strict=True):
            assert one.logprob == other.logprob
            assert one.top_ids == other.top_ids
        assert progress.features_F is not None and alone.progress[-1].features_F is not None
        assert torch.equal(progress.features_F, alone.progress[-1].features_F)


class Fuller(LocalPlanner[int, int]):
    """The planner of a gang whose other rank always has more tokens."""

    def __init__(self, num_more: int) -> None:
        super().__init__(max_num_tokens)
        self.proposals: list[int] = []
        self._num_more = num_more

    def plan(self, proposal: int) -> Plan[int]:
        self.proposals.append(proposal)
        return Plan(len(self.proposals), proposal + self._num_more)


def test_a_step_has_the_planned_size_whatever_the_rank_has_to_do(loaded: LoadedModel) -> None:
    """Padding and whole dummy steps change only the dummy page's slots, and no answer."""
    network = Counted(loaded.network)
    padded, alone = Bench(replace(loaded, network=network)), Bench(loaded)
    padded.prefill._planner = planner = Fuller(5)
    before = [cache[1:].clone() for cache in padded.all_caches()]
    padded.prefill.step()
    assert network.forwards == [5] and not padded.progress
    for cache, known in zip(padded.all_caches(), before, strict=True):
        assert torch.equal(cache[1:], known)
    request = greedy("a", ids_of(0), 4)
    assert padded.start(request)[0] == alone.start(request)[0]
    assert network.forwards == [5, len(ids_of(0)) + 5]
    assert planner.proposals == [0, len(ids_of(0))]


def test_the_fullest_rank_decides_and_without_work_there_is_no_step() -> None:
    assert max_num_tokens([3, 0, 7]) == 7
    assert max_num_tokens([0, 0]) is None
    assert LocalPlanner(max_num_tokens).plan(2) == Plan(1, 2)
