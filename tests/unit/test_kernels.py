"""Kernels compared with plain torch in fp64, in both dtypes, over shapes with every remainder.

Nothing is written outside of the outputs. With native kernels a row has the same bits in any batch.
TRITON_INTERPRET=1 tests the GPU kernels.
"""

import weakref
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tandem.core.config import TINY_MODEL
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels import build, create_kernels
from tandem.model.kernels.base import TORCH_KERNELS, AttentionMetadata, Kernels, Routing
from tandem.model.network.batch import Batch, Segments
from tandem.model.network.tree import build_tree
from tests.kernels import (
    IS_INTERPRETED,
    TYPES,
    gpu_only,
    native_only,
    often_interpreted,
    ours,
)
from tests.numerics import NUM_LANES, UNIT, assert_near, rounding
from tests.often import often

MANY_PAIRS = [(False, TYPES[1])] if IS_INTERPRETED else [(False, TYPES[1]), (True, TYPES[0])]
"""Cases of test_many_pairs_of_experts that are not marked slow."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    got: Tensor,
    wanted: Tensor,
    dtype: torch.dtype,
    length: float,
    num_rounded: int = 1,
    growth: float = 1.0,
) -> None:
    """Check a result of kernels, which sum in fp32.

    Args:
        wanted: The result in fp64, of the same rounded inputs.
        length: Number of roundings in the sums of an element.
        num_rounded: Number of values of ``dtype`` that an element depends on, itself included.
        growth: Factor by which the computation amplifies a relative error.
    """
    largest = float(wanted.abs().max())
    stored = num_rounded * UNIT[dtype] * largest
    assert_near(got, wanted, growth * (stored + rounding(length, largest)))


@native_only
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 13, 100])
@pytest.mark.parametrize(("width", "num_out"), [(40, 16), (192, 100), (7, 3), (96, 160)])
def test_linear(num_rows: int, width: int, num_out: int, dtype: torch.dtype) -> None:
    x, weight = draw(num_rows, width, dtype=dtype), draw(num_out, width, seed=1, dtype=dtype)
    packed = ours().pack(weight)
    wanted = x.double() @ weight.double().T
    for in_fp32 in (False, True):
        got = ours().linear(x, packed, num_out, in_fp32)
        assert got.dtype == (torch.float32 if in_fp32 else dtype)
        check(got, wanted, torch.float32 if in_fp32 else dtype, length=width)
    wide = torch.cat((x, x), 1)[:, :width]
    assert torch.equal(ours().linear(wide, packed, num_out), ours().linear(x, packed, num_out))


@native_only
@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_a_sum_has_the_bits_of_one_product_after_the_other(num_rows: int) -> None:
    """A sum has the bits of one product added after another, whatever vector width the processor
    has. Products of bf16 numbers are exact in fp32."""
    x, weight = draw(num_rows, 194, dtype=TYPES[1]), draw(48, 194, seed=1, dtype=TYPES[1])
    total = torch.zeros(num_rows, 48)
    for k in range(194):
        total += x[:, k, None].float() * weight[:, k].float()
    assert torch.equal(ours().linear(x, ours().pack(weight), 48, True), total)


@native_only
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_is_the_same_bits_in_any_company_and_on_any_threads(dtype: torch.dtype) -> None:
    x, packed = draw(64, 192, dtype=dtype), ours().pack(draw(480, 192, seed=1, dtype=dtype))
    together = ours().linear(x, packed, 480)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 13), slice(20, 61)):
        assert torch.equal(ours().linear(x[rows].contiguous(), packed, 480), together[rows])
    attended = Pages.make(6, 3, dtype)
    alone = [attended.attend(b, b + 1) for b in range(6)]
    whole = attended.attend()
    assert torch.equal(torch.cat(alone), whole)
    try:
        ours().use_threads(3)
        assert torch.equal(ours().linear(x, packed, 480), together)
        assert torch.equal(attended.attend(), whole)
    finally:
        ours().use_threads(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 41, 192])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, more, weight = (draw(5, width, seed=i, dtype=dtype) for i in range(3))
    weight = weight[0].contiguous()

    def norm(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()

    num_added = width / NUM_LANES
    check(ours().rms_norm(x, weight, 1e-6), norm(x.double()), dtype, num_added)
    total, normed = ours().add_rms_norm(x, more, weight, 1e-6)
    assert torch.equal(total, x + more)
    check(normed, norm(total.double()), dtype, num_added)
    apart = torch.cat((x, more), 1)[:, :width]
    assert torch.equal(ours().rms_norm(apart, weight, 1e-6), ours().rms_norm(x, weight, 1e-6))


CONTEXTS = [1, 5, 31, 32, 33, 130] if IS_INTERPRETED else [1, 5, 256, 257, 300, 700]
"""Context lengths around the sizes of tiles."""
HEADS, NOPE, VALUE, SCALE = 5, 24, 48, 0.1
ROPE, LATENT = (16, 32) if IS_INTERPRETED else (32, 112)
"""The native sizes leave every remainder of 64, 32 and 16."""
SPREAD = SCALE * (NOPE * LATENT + ROPE) ** 0.5
"""RMS of the scores of normal numbers. The relative error of a score becomes SPREAD times as large
in the score's weight."""
ATTENDED = NOPE + 2 * LATENT + ROPE + max(CONTEXTS) / NUM_LANES
"""Number of roundings in the sums of an output: queries, scores, weights, latents, outputs."""


@dataclass
class Pages:
    """``num_q`` query rows for each of several sequences of very different lengths. Entries that no
    row may read hold NaN."""

    q_XHK: Tensor
    up_k: Tensor
    up_v: Tensor
    angles: tuple[Tensor, Tensor]
    cache: Tensor
    batch: Batch
    is_interleaved: bool = True

    @classmethod
    def make(cls, num_seqs: int, num_q: int, dtype: torch.dtype, page_size: int = 16) -> "Pages":
        lengths = torch.tensor(CONTEXTS)[:num_seqs]
        width, num = -(-max(CONTEXTS) // page_size), num_seqs * num_q
        table = torch.randperm(num_seqs * width).view(num_seqs, width) + 1
        lens_BQ = (lengths[:, None] - torch.arange(num_q).flip(0)).clamp(min=1)
        cache = draw(1 + num_seqs * width, page_size, LATENT + ROPE, seed=2, dtype=dtype)
        cache[0] = float("nan")
        for length, pages in zip(lengths.tolist(), table, strict=True):
            slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
            cache.flatten(0, 1)[slots[length:]] = float("nan")
        angles = draw(num, ROPE // 2, seed=4).cos(), draw(num, ROPE // 2, seed=4).sin()
        ups = (
            draw(HEADS, LATENT, NOPE, dtype=dtype),
            draw(HEADS, VALUE, LATENT, seed=1, dtype=dtype),
        )
        q = draw(num, HEADS, NOPE + ROPE, seed=3, dtype=dtype)
        nothing = torch.zeros_like(lens_BQ)
        return cls(q, *ups, angles, cache, Batch(nothing, nothing, nothing, lens_BQ, table))

    def attend(
        self, first: int = 0, last: int | None = None, kernels: Kernels | None = None
    ) -> Tensor:
        """Return the attention of sequences ``first`` to ``last`` (default: the kernels under
        test)."""
        batch, num_q = self.batch, self.batch.context_lens_BQ.shape[1]
        rows = slice(first * num_q, None if last is None else last * num_q)
        table, lens = batch.page_table_BP[first:last], batch.context_lens_BQ[first:last]
        cos, sin = (angle[rows] for angle in self.angles)
        kernels = kernels or ours()
        ups = kernels.pack(self.up_k), kernels.pack(self.up_v)
        bits_BQ = None if batch.bits_BQ is None else batch.bits_BQ[first:last]
        how = AttentionMetadata(cos, sin, self.is_interleaved, self.cache, table, SCALE, bits_BQ)
        return kernels.mla_attend(self.q_XHK[rows], *ups, how, lens)

    def as_trees(self) -> "Pages":
        """Return the rows as nodes of random trees after the shortest context of each sequence."""
        batch, num_q = self.batch, self.batch.context_lens_BQ.shape[1]
        generator = torch.Generator().manual_seed(9)
        parents = [
            torch.randint(i, (len(batch.context_lens_BQ),), generator=generator)
            for i in range(1, num_q)
        ]
        tree = build_tree(torch.stack(parents, 1), num_q)
        lens_B1 = (batch.context_lens_BQ.amax(1, keepdim=True) - num_q).clamp(min=0)
        context_lens_BQ = lens_B1.expand_as(tree.bits_BQ)
        return replace(
            self, batch=replace(batch, context_lens_BQ=context_lens_BQ, bits_BQ=tree.bits_BQ)
        )

    def path(self, b: int, node: int) -> "Pages":
        """Return one node of a sequence, with its path copied after the context, as a chain would
        lie."""
        batch, num_q = self.batch, self.batch.context_lens_BQ.shape[1]
        assert batch.bits_BQ is not None
        bits, context = int(batch.bits_BQ[b, node]), int(batch.context_lens_BQ[b, node])
        slots = [*range(context), *(context + i for i in range(num_q) if bits >> i & 1)]
        table, page_size = batch.page_table_BP[b], self.cache.shape[1]
        cache, all_slots = (
            self.cache.clone(),
            (table[:, None] * page_size + torch.arange(page_size)).flatten(),
        )
        cache.flatten(0, 1)[all_slots] = float("nan")
        cache.flatten(0, 1)[all_slots[: len(slots)]] = self.cache.flatten(0, 1)[all_slots[slots]]
        x = b * num_q + node
        lens, rows = torch.tensor([[len(slots)]]), slice(x, x + 1)
        chain = replace(batch, context_lens_BQ=lens, page_table_BP=table[None], bits_BQ=None)
        cos, sin = (angle[rows] for angle in self.angles)
        return replace(self, q_XHK=self.q_XHK[rows], angles=(cos, sin), cache=cache, batch=chain)

    def wanted(self) -> Tensor:
        """Compute the expected output sequence by sequence, over the entries that each may read."""
        outs = []
        for b, lens_Q in enumerate(self.batch.context_lens_BQ):
            context = self.cache[self.batch.page_table_BP[b]].flatten(0, 1)[: int(lens_Q.max())]
            rows = slice(b * len(lens_Q), (b + 1) * len(lens_Q))
            cos, sin = (angle[rows] for angle in self.angles)
            where = context[None].double(), torch.tensor([[0]])
            how = AttentionMetadata(cos, sin, self.is_interleaved, *where, SCALE)
            ups = self.up_k.double(), self.up_v.double()
            outs.append(
                TORCH_KERNELS.mla_attend(self.q_XHK[rows].double(), *ups, how, lens_Q[None])
            )
        return torch.cat(outs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_q", often_interpreted([1, 2, 4], [1, 4]))
@pytest.mark.parametrize(("is_interleaved", "page_size"), [(True, 16), (False, 16), (True, 64)])
def test_latent_attention_reads_pages_in_place(
    is_interleaved: bool, page_size: int, num_q: int, dtype: torch.dtype
) -> None:
    """Pages hold less than a tile of slots, exactly one, or several."""
    told = replace(Pages.make(6, num_q, dtype, page_size), is_interleaved=is_interleaved)
    got = told.attend()
    assert got.isfinite().all()
    check_attended(got, told.wanted(), dtype)


def check_attended(
    got: Tensor, wanted: Tensor, dtype: torch.dtype, growth: float = 0.6 * SPREAD
) -> None:
    """Check attention. Queries in latent space and the attended latents are rounded on the way.
    Errors of scores are mostly below their bound, and errors of weights average out."""
    check(got, wanted, dtype, ATTENDED, num_rounded=3, growth=growth)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_q", [2, 4] if IS_INTERPRETED else [2, 5, 17, 64])
def test_a_node_of_a_tree_sees_its_context_and_its_path(num_q: int, dtype: torch.dtype) -> None:
    """On CPUs the bits equal those of the path as a chain, on both sides of a split of the
    context."""
    told = Pages.make(6, num_q, dtype)
    lens_B = told.batch.context_lens_BQ.amax(1)
    slots_BS = told.batch.page_table_BP.unsqueeze(2) * 16 + torch.arange(16)
    for length, slots_S in zip(lens_B.tolist(), slots_BS.flatten(1), strict=True):
        # Slots that bits can refer to are read, whether or not a row sees them.
        free = told.cache.flatten(0, 1)[slots_S[length : length + 64]]
        told.cache.flatten(0, 1)[slots_S[length : length + 64]] = free.nan_to_num(0.5)
    trees = told.as_trees()
    got = trees.attend().unflatten(0, (6, num_q))
    for b in range(6):
        for node in {0, 1, num_q // 2, num_q - 1}:
            path = trees.path(b, node)
            if IS_INTERPRETED:
                check_attended(got[b, node][None], path.wanted(), dtype, growth=SPREAD)
            else:
                assert torch.equal(got[b, node], path.attend()[0])


BROKEN = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("kernels", ["plain", "ours"])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("value", often_interpreted(BROKEN, BROKEN[:1]))
def test_a_slot_counts_for_the_rows_that_see_it_alone(
    value: float, is_tree: bool, kernels: str
) -> None:
    """A slot that is not finite affects only the rows that see it. It holds the last draft of a
    chain, or one node of a tree, in every sequence."""
    own, num_q = TORCH_KERNELS if kernels == "plain" else ours(), 4
    told = Pages.make(6, num_q, torch.float32)
    lens_B = told.batch.context_lens_BQ.amax(1)
    slots_BS = (told.batch.page_table_BP.unsqueeze(2) * 16 + torch.arange(16)).flatten(1)
    for length, slots_S in zip(lens_B.tolist(), slots_BS, strict=True):
        free = told.cache.flatten(0, 1)[slots_S[length : length + 64]]
        told.cache.flatten(0, 1)[slots_S[length : length + 64]] = free.nan_to_num(0.5)
    at_B = lens_B - 1
    sees_BQ = at_B.unsqueeze(1) < told.batch.context_lens_BQ
    if is_tree:
        told = told.as_trees()
        assert told.batch.bits_BQ is not None
        at_B = told.batch.context_lens_BQ[:, 0] + 1
        sees_BQ = told.batch.bits_BQ >> 1 & 1 == 1
    wanted = told.attend(kernels=own).unflatten(0, (6, num_q))
    assert wanted.isfinite().all()
    told.cache.flatten(0, 1)[slots_BS.gather(1, at_B.unsqueeze(1)).squeeze(1), 3] = value
    got = told.attend(kernels=own).unflatten(0, (6, num_q))
    assert torch.equal(got[~sees_BQ], wanted[~sees_BQ])
    assert sees_BQ.any() and not sees_BQ.all() and not got[sees_BQ].isfinite().any()


@pytest.mark.parametrize("kernels", ["plain", "ours"])
@pytest.mark.parametrize("value", BROKEN[:1] if IS_INTERPRETED else BROKEN)
def test_a_token_of_a_prompt_counts_for_those_after_it_alone(value: float, kernels: str) -> None:
    """A prompt token that is not finite affects only later tokens of its segment."""
    packed, own = Packed.make(torch.float32), TORCH_KERNELS if kernels == "plain" else ours()
    chosen, back = [1, 2, 3] if IS_INTERPRETED else [0, 1, 2, 3, 5], (1, 3, 59, 2, 0, 30)
    wanted = packed.attend(own, chosen)
    broken = packed.cache.clone()
    for g in chosen:
        slots = (packed.pages[g][:, None] * 16 + torch.arange(16)).flatten()
        broken.flatten(0, 1)[slots[PACKED[g][1] - back[g]], 3] = value
    got = replace(packed, cache=broken).attend(own, [*chosen, 4])
    assert got.pop().isfinite().all()
    for g, own_rows, before in zip(chosen, got, wanted, strict=True):
        first = len(own_rows) - min(back[g], len(own_rows))
        assert torch.equal(own_rows[:first], before[:first])
        assert not own_rows[first:].isfinite().any()


@pytest.mark.parametrize("dtype", TYPES)
def test_moves_within_rows_in_all_caches(dtype: torch.dtype) -> None:
    """Moves are done in order, so a slot that is both read and written is read first."""
    caches = [draw(6, 8, 24, seed=i, dtype=dtype) for i in range(3)]
    from_BN = torch.tensor([[11, 13, 14], [25, 26, 4], [40, 41, 42]])
    to_BN = torch.tensor([[10, 11, 13], [25, 26, 5], [40, 40, 41]])
    wanted = [cache.clone() for cache in caches]
    for cache in wanted:
        for source, target in zip(from_BN.flatten(), to_BN.flatten(), strict=True):
            cache.flatten(0, 1)[target] = cache.flatten(0, 1)[source].clone()
    ours().copy_slots(caches, from_BN, to_BN)
    assert all(map(torch.equal, caches, wanted))


def test_a_short_context_in_many_parts() -> None:
    """A short context is split in many parts, most of which see no slot."""
    told = Pages.make(2, 3, torch.float32)
    # Weights of only a few slots hardly depend on their scores.
    check_attended(told.attend(), told.wanted(), torch.float32, growth=1.0)


PACKED = ((1, 1), (7, 7), (60, 60), (100, 700), (3, 513), (1, 512), (130, 1030))
if IS_INTERPRETED:
    PACKED = ((1, 1), (7, 7), (60, 60), (3, 65), (1, 64), (130, 230))
"""Tokens of each segment, and its context including them: around the block sizes of both."""


@dataclass
class Packed:
    """Segments one after another, then padding. Entries that no row may read hold NaN."""

    q_THK: Tensor
    kv_b: Tensor
    angles: tuple[Tensor, Tensor]
    cache: Tensor
    pages: list[Tensor]

    @classmethod
    def make(cls, dtype: torch.dtype, page_size: int = 16, num_padding: int = 3) -> "Packed":
        num = sum(num for num, _ in PACKED) + num_padding
        sizes = [-(-context // page_size) for _, context in PACKED]
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(5)) + 1
        pages = list(order.split(sizes))
        cache = draw(1 + sum(sizes), page_size, LATENT + ROPE, seed=2, dtype=dtype)
        cache[0] = float("nan")
        for (_, context), own in zip(PACKED, pages, strict=True):
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()
            cache.flatten(0, 1)[slots[context:]] = float("nan")
        q = draw(num, HEADS, NOPE + ROPE, seed=3, dtype=dtype)
        angles = draw(num, ROPE // 2, seed=4).cos(), draw(num, ROPE // 2, seed=4).sin()
        return cls(q, draw(HEADS, NOPE + VALUE, LATENT, dtype=dtype), angles, cache, pages)

    def attend(self, kernels: Kernels, chosen: list[int], drop: int = 0) -> list[Tensor]:
        """Return the attention of the ``chosen`` segments, without the first ``drop`` tokens of
        each."""
        starts = list(accumulate((num for num, _ in PACKED), initial=0))
        lengths = [PACKED[g][0] - min(drop, PACKED[g][0] - 1) for g in chosen]
        ends = [starts[g + 1] for g in chosen]
        rows = [torch.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        index = torch.cat((*rows, torch.arange(starts[-1], len(self.q_THK))))
        contexts = tuple(PACKED[g][1] for g in chosen)
        cos, sin = (angle[index] for angle in self.angles)
        table = torch.cat([self.pages[g] for g in chosen])[None]
        how = AttentionMetadata(cos, sin, True, self.cache, table, SCALE)
        segments = Segments(tuple(lengths), contexts, torch.tensor(lengths).cumsum(0))
        told = how, segments, VALUE
        out = kernels.mla_prefill(self.q_THK[index], kernels.pack(self.kv_b), *told)
        *parts, padding = out.split([*lengths, len(index) - sum(lengths)])
        assert not padding.any()
        return parts

    def wanted(self, g: int) -> Tensor:
        """Compute the expected output row by row in fp64."""
        num, context = PACKED[g]
        first = sum(num for num, _ in PACKED[:g])
        c, k_pe = (
            self.cache[self.pages[g]].flatten(0, 1)[:context].double().split([LATENT, ROPE], 1)
        )
        kv = torch.einsum("sc,huc->hsu", c, self.kv_b.double())
        out = []
        for i in range(num):
            nope, pe = self.q_THK[first + i].double().split([NOPE, ROPE], -1)
            cos, sin = (angle[first + i].double() for angle in self.angles)
            pe = torch.stack((pe[:, 0::2] * cos - pe[:, 1::2] * sin,
                              pe[:, 0::2] * sin + pe[:, 1::2] * cos), -1).flatten(1)  # fmt: skip
            scores = torch.einsum("hn,hsn->hs", nope, kv[..., :NOPE]) + pe @ k_pe.T
            seen = scores[:, : context - num + i + 1] * SCALE
            out.append(torch.einsum("hs,hsv->hv", seen.softmax(-1), kv[:, : seen.shape[1], NOPE:]))
        return torch.stack(out)


@pytest.mark.parametrize("dtype", TYPES)
def test_packed_attention(dtype: torch.dtype) -> None:
    """Expanded keys and values are rounded."""
    packed, everyone = Packed.make(dtype), list(range(len(PACKED)))
    ways = packed.attend(ours(), everyone), packed.attend(TORCH_KERNELS, everyone)
    for g, wanted in enumerate(map(packed.wanted, everyone)):
        for got in (ways[0][g], ways[1][g]):
            assert got.isfinite().all()
            check_attended(got, wanted, dtype)


@gpu_only
def test_heads_are_expanded_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, everyone = Packed.make(torch.float32), [1, 2, 3]
    whole = packed.attend(ours(), everyone)
    some = 4 * (NOPE + VALUE) * 16 * sum(len(packed.pages[g]) for g in everyone) * (HEADS - 1)
    monkeypatch.setattr("tandem.model.kernels.gpu.prefill.MAX_EXPANDED_BYTES", some)
    for a, b in zip(packed.attend(ours(), everyone), whole, strict=True):
        check_attended(a, b.double(), torch.float32)


@native_only
@pytest.mark.parametrize("dtype", TYPES)
def test_a_packed_row_is_the_same_bits_in_any_chunk_and_company(dtype: torch.dtype) -> None:
    packed, everyone = Packed.make(dtype), list(range(len(PACKED)))
    whole = packed.attend(ours(), everyone)
    for drop in (1, 5, 47, 90):
        for part, own in zip(packed.attend(ours(), everyone, drop), whole, strict=True):
            assert torch.equal(part, own[-len(part) :])
    try:
        for num in (1, 3, 16):
            ours().use_threads(num)
            [alone] = packed.attend(ours(), [6])
            assert torch.equal(alone, whole[6])
    finally:
        ours().use_threads(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_entries(is_interleaved: bool, dtype: torch.dtype) -> None:
    num, rank, pe = 7, 32, 16
    angles = draw(num, pe // 2, seed=4).cos(), draw(num, pe // 2, seed=4).sin()
    kv, weight = draw(num, rank + pe, dtype=dtype), draw(rank, seed=1, dtype=dtype)
    slots = torch.tensor([5, 0, 9, 17, 30, 2, 11])
    caches = [torch.full((4, 8, rank + pe), 7.0, dtype=kind) for kind in (dtype, torch.float64)]
    hows = [
        AttentionMetadata(*angles, is_interleaved, cache, slots[None], SCALE) for cache in caches
    ]
    ours().write_mla_cache(kv, weight, 1e-6, hows[0], slots)
    TORCH_KERNELS.write_mla_cache(kv.double(), weight.double(), 1e-6, hows[1], slots)
    written, wanted = (cache.flatten(0, 1)[slots] for cache in caches)
    check(written, wanted, dtype, rank / NUM_LANES)
    for cache in caches:
        cache.flatten(0, 1)[slots] = 7.0
        assert (cache == 7.0).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("num_slots", "width"), often_interpreted([(5, 16), (5, 24), (100, 24)], [(5, 24)])
)
def test_experts(num_slots: int, width: int, dtype: torch.dtype) -> None:
    """Counts are uneven, some experts have no token, and some pairs are on other ranks."""
    num_tokens, dim = 17, 40
    # roundings of sums; rounded values: gate, up, their product, the output
    behind = dim + width, 4
    x = draw(num_tokens, dim, dtype=dtype)
    gate_up = draw(num_slots, 2 * width, dim, seed=1, dtype=dtype) * 0.3
    down = draw(num_slots, dim, width, seed=2, dtype=dtype) * 0.3
    packed = ours().pack_experts(gate_up, down)

    def one(token: int, slot: int) -> Tensor:
        gate, up = (gate_up[slot].double() @ x[token].double()).chunk(2)
        return down[slot].double() @ (torch.nn.functional.silu(gate) * up)

    for num in (1, 60, 90):
        tokens = torch.randint(0, num_tokens, (num,), generator=torch.Generator().manual_seed(3))
        slots = torch.tensor([0, 0, 0, 3, num_slots, num_slots - 1])[(torch.arange(num) + 1) % 6]
        got, here = ours().fused_experts(x, tokens, slots, *packed), slots < num_slots
        pairs = zip(tokens[here].tolist(), slots[here].tolist(), strict=True)
        check(got[here], torch.stack([one(*pair) for pair in pairs]), dtype, *behind)
    two_each = ours().fused_experts(x, None, torch.arange(34) % num_slots, *packed)
    wanted = torch.stack([one(i // 2, i % num_slots) for i in range(34)])
    check(two_each, wanted, dtype, *behind)
    alone = ours().fused_experts(x, None, None, *packed)
    check(alone, torch.stack([one(i, 0) for i in range(17)]), dtype, *behind)
    assert ours().fused_experts(x[:0], None, slots[:0], *packed).shape == (0, dim)


@gpu_only
@pytest.mark.parametrize(
    ("is_wide", "dtype"),
    often(product((False, True), TYPES), MANY_PAIRS),
)
def test_many_pairs_of_experts(is_wide: bool, dtype: torch.dtype) -> None:
    """One expert has more than a tile of pairs and another none, in any order; once all pairs
    are of one expert. Rows that are not read hold NaN. Wide experts have more than a block of
    outputs."""
    num_tokens, num_slots, dim, num = 31, 4, 72, 260
    width = 16 if not is_wide else 48 if dtype == torch.float32 else 200
    x = draw(num_tokens + 1, dim, dtype=dtype)
    x[num_tokens] = float("nan")
    gate_up = draw(num_slots, 2 * width, dim, seed=1, dtype=dtype) * 0.2
    down = draw(num_slots, dim, width, seed=2, dtype=dtype) * 0.2
    packed, made = ours().pack_experts(gate_up, down), torch.Generator().manual_seed(3)
    tokens = torch.randint(0, num_tokens, (num,), generator=made)
    drawn = torch.tensor([0, 1, 1, 1, 1, 3, num_slots])[torch.randint(0, 7, (num,), generator=made)]
    for slots, num_ranks in ((drawn, 1), (drawn, 2), (torch.full((num,), 2), 1)):
        told = torch.where(slots < num_slots, tokens, num_tokens)
        got, here = ours().fused_experts(x, told, slots, *packed, num_ranks), slots < num_slots
        gate, up = torch.einsum(
            "pd,pfd->pf", x[tokens[here]].double(), gate_up[slots[here]].double()
        ).chunk(2, 1)
        hidden = torch.nn.functional.silu(gate) * up
        wanted = torch.einsum("pf,pdf->pd", hidden, down[slots[here]].double())
        check(got[here], wanted, dtype, dim + width, num_rounded=4)


@gpu_only
@pytest.mark.parametrize("most_at_once", [0, 1 << 20])
@pytest.mark.parametrize(
    ("num_pairs", "num_slots"), [(1, 1), (1023, 5), (1025, 3), (1100, 64), (9000, 7)]
)
def test_pairs_are_sorted_by_slot(
    num_pairs: int, num_slots: int, most_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs keep their order, without those on other ranks, over one chunk and several."""
    from tandem.model.kernels.gpu import pairs

    monkeypatch.setattr(pairs, "MAX_PAIRS_PER_PASS", most_at_once)
    made = torch.Generator().manual_seed(num_pairs)
    drawn = torch.randint(0, num_slots + 1, (num_pairs,), generator=made)
    for slots in (drawn, torch.full_like(drawn, num_slots - 1), torch.full_like(drawn, num_slots)):
        order, starts = pairs.by_slot(slots, num_slots)
        counts = torch.bincount(slots, minlength=num_slots + 1)
        assert starts.tolist() == (counts.cumsum(0) - counts).tolist()
        num_here = int(starts[-1])
        assert torch.equal(order[:num_here].long(), slots.sort(stable=True).indices[:num_here])


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("num_groups", often_interpreted([1, 4], [4]))
@pytest.mark.parametrize(("num_tokens", "dim"), [(50, 24), (7, 300), (70, 24)])
def test_routing(sigmoid: bool, num_groups: int, num_tokens: int, dim: int) -> None:
    how = Routing((16, num_groups, 2, 3), sigmoid, sigmoid, sigmoid, -float("inf"), 2.5)
    if num_groups == 1:
        how = how._replace(sizes=(16, 1, 1, 3))
    x, weight = draw(num_tokens, dim), draw(16, dim, seed=1) * (24 / dim) ** 0.5
    bias = draw(16, seed=2) * 0.1
    ids, weights = ours().route(x, ours().pack(weight), bias if sigmoid else None, how)
    told = TORCH_KERNELS.route(x.double(), weight.double(), bias if sigmoid else None, how)
    assert torch.equal(ids, told[0])
    # The relative error of a weight is the absolute error of its logit.
    spread = float((x.double() @ weight.double().T).square().mean().sqrt())
    check(weights, told[1].double(), torch.float32, dim / NUM_LANES, growth=spread)


def test_a_token_that_is_not_a_number_is_routed_somewhere_and_alone() -> None:
    how = Routing((16, 4, 2, 3), True, True, True, -float("inf"), 2.5)
    x, packed, bias = draw(6, 24), ours().pack(draw(16, 24, seed=1)), draw(16, seed=2) * 0.1
    before, _ = ours().route(x, packed, bias, how)
    x[3] = float("nan")
    ids, _ = ours().route(x, packed, bias, how)
    assert len(set(ids[3].tolist())) == 3 and 0 <= int(ids.min()) <= int(ids.max()) < 16
    assert torch.equal(ids[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("dtype", TYPES)
def test_combining(dtype: torch.dtype) -> None:
    out, weights, more = draw(9, 3, 40, dtype=dtype), draw(9, 3, seed=1), draw(9, 40, dtype=dtype)
    x, scale = draw(9, 40, seed=2, dtype=dtype), draw(40, seed=3, dtype=dtype)
    for one in (None, more):
        exact = x.double() + TORCH_KERNELS.combine(out.double(), weights, one)
        total, normed = ours().add_rms_norm(x, ours().combine(out, weights, one), scale, 1e-6)
        check(total, exact, dtype, length=4, num_rounded=2)
        wanted = TORCH_KERNELS.rms_norm(total.double(), scale.double(), 1e-6)
        check(normed, wanted, dtype, 40 / NUM_LANES)


def test_what_experts_gave_is_held_until_it_was_added_and_no_longer() -> None:
    """The output of experts is freed once it was added: the layer's result does not keep it alive.
    For prompts it is hundreds of MB."""
    out, x = draw(9, 3, 40), draw(9, 40, seed=2)
    seen, more = weakref.ref(out), ours().combine(out, draw(9, 3, seed=1), None)
    del out
    ours().add_rms_norm(x, more, draw(40, seed=3), 1e-6)
    assert seen() is None


@native_only
def test_not_a_number_stays_one_and_stays_in_its_row() -> None:
    x = draw(4, 32, dtype=torch.bfloat16)
    x[2] = float("nan")
    y = ours().linear(x, ours().pack(draw(16, 32, dtype=torch.bfloat16)), 16)
    assert y[2].isnan().all() and not y[[0, 1, 3]].isnan().any()


def test_gpus_without_a_compiler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU kernels without a C compiler are refused at startup, not in the first step. Slow kernels
    must be selected explicitly."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    given = ModelConfig.from_dir(TINY_MODEL), torch.device("cuda")
    with pytest.raises(
        ValueError, match="model.kernels='auto': .*needs a C compiler .*install gcc"
    ):
        create_kernels("auto", *given)
    assert create_kernels("torch", *given).name == "torch"


@pytest.mark.parametrize(
    ("name", "major", "minor"),
    [("NVIDIA A100-SXM4-80GB", 8, 0), ("NVIDIA L4", 8, 9), ("NVIDIA B200", 10, 0)],
)
def test_gpus_that_kernels_are_not_made_for_have_plain_ones_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int
) -> None:
    """GPUs that the kernels do not support use the torch kernels. This is reported at startup, not
    by the failure of a first step."""
    pytest.importorskip("triton")
    card = SimpleNamespace(name=name, multi_processor_count=108, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setenv("CC", "cc")
    asked = ModelConfig.from_dir(TINY_MODEL), torch.device("cuda")
    found = create_kernels("auto", *asked)
    told = f"{name} has compute capability {major}.{minor}"
    assert found.name == TORCH_KERNELS.name and told in found.fallback_reason
    with pytest.raises(ValueError, match="'triton': cannot be used: .*use auto or torch"):
        create_kernels("triton", *asked)
    card.major = 9
    assert create_kernels("auto", *asked).name == "triton"


@native_only
def test_without_a_compiler_steps_are_plain_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    asked = ModelConfig.from_dir(TINY_MODEL), torch.device("cpu")
    found = create_kernels("auto", *asked)
    assert found.name == TORCH_KERNELS.name and "install g++" in found.fallback_reason
    assert "native kernels cannot be used: no C++ compiler" in caplog.text
    with pytest.raises(ValueError, match=r"model\.kernels='native': cannot be used: no C\+\+ comp"):
        create_kernels("native", *asked)


@native_only
def test_what_does_not_compile_says_why_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "native.cpp"
    source.write_text("int main( {")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "SOURCES", (source,))
    with pytest.raises(ValueError, match=r"cannot compile kernels: .*native\.cpp.*error"):
        build.build_library()
    assert not list((tmp_path / "tandem" / "kernels").glob("*.so"))
