"""Grouped-query attention over pages, compared with torch in float64, row by row. Nodes of a tree
are compared with their paths. TRITON_INTERPRET=1 tests the GPU kernels."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tandem.model.kernels.base import TORCH_KERNELS, AttentionMetadata, Kernels, rotate
from tests.kernels import IS_INTERPRETED, TYPES, native_only, often_interpreted, ours
from tests.numerics import NUM_LANES, UNIT, assert_near, rounding

CONTEXTS = [1, 5, 31, 32, 33, 130] if IS_INTERPRETED else [1, 5, 256, 257, 300, 700]
GROUPS, EACH, WIDTH, SCALE = 2, 3, 32, 0.2
PAGE_SIZE = 16
BROKEN = [(float("nan"), 3), (float("inf"), -3)]
"""A value that is not finite, and its place in a cache entry."""
ATTENDED = WIDTH + max(CONTEXTS) / NUM_LANES
"""Number of roundings in the sums of an output: scores, which are about 1 here, and weights."""


@dataclass
class Grouped:
    """``num_q`` query rows for each of several sequences. Entries that no row may read hold NaN."""

    q_XHK: Tensor
    how: AttentionMetadata
    lens_BQ: Tensor

    @classmethod
    def make(cls, num_q: int, dtype: torch.dtype, room: int = 0) -> "Grouped":
        generator = torch.Generator().manual_seed(num_q)
        num_seqs = len(CONTEXTS)
        width = -(-(max(CONTEXTS) + room) // PAGE_SIZE)
        table = torch.randperm(num_seqs * width, generator=generator).view(num_seqs, width) + 1
        lens_BQ = (torch.tensor(CONTEXTS)[:, None] - torch.arange(num_q).flip(0)).clamp(min=1)
        shape = 1 + num_seqs * width, PAGE_SIZE, 2 * GROUPS * WIDTH
        cache = torch.randn(shape, generator=generator).to(dtype)
        cache[0] = float("nan")
        for length, pages in zip(CONTEXTS, table, strict=True):
            slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
            cache.flatten(0, 1)[slots[length + room :]] = float("nan")
        angle = torch.randn(num_seqs * num_q, WIDTH // 2, generator=generator)
        q = torch.randn(num_seqs * num_q, GROUPS * EACH, WIDTH, generator=generator).to(dtype)
        how = AttentionMetadata(angle.cos(), angle.sin(), False, cache, table, SCALE)
        return cls(q, how, lens_BQ)

    def attend(self, kernels: Kernels) -> Tensor:
        return kernels.gqa_attend(self.q_XHK, self.how, self.lens_BQ)

    def wanted(self) -> Tensor:
        how = self.how
        angles = how.cos.unsqueeze(1).double(), how.sin.unsqueeze(1).double()
        q_XHK = rotate(self.q_XHK, angles, how.is_interleaved).double()
        out = torch.empty_like(q_XHK)
        for x, row in enumerate(q_XHK):
            b, i = divmod(x, self.lens_BQ.shape[1])
            entries = how.cache[how.page_table_BP[b]].flatten(0, 1).double()
            seen = list(range(int(self.lens_BQ[b, i])))
            if how.bits_BQ is not None:
                bits = int(how.bits_BQ[b, i])
                seen += [len(seen) + n for n in range(64) if bits >> n & 1]
            keys, values = entries[seen].unflatten(1, (2, GROUPS, WIDTH)).unbind(1)
            for h in range(GROUPS * EACH):
                weights = (keys[:, h // EACH] @ row[h] * SCALE).softmax(0)
                out[x, h] = weights @ values[:, h // EACH]
        return out

    def rows(self, b: int, i: int) -> "Grouped":
        """Return a copy with only row ``i`` of sequence ``b``."""
        x, how = b * self.lens_BQ.shape[1] + i, self.how
        bits = None if how.bits_BQ is None else how.bits_BQ[b : b + 1, i : i + 1]
        own = how._replace(
            cos=how.cos[x : x + 1],
            sin=how.sin[x : x + 1],
            page_table_BP=how.page_table_BP[b : b + 1],
            bits_BQ=bits,
        )
        return Grouped(self.q_XHK[x : x + 1], own, self.lens_BQ[b : b + 1, i : i + 1])


def check(told: Grouped, got: Tensor) -> None:
    wanted, dtype = told.wanted(), told.q_XHK.dtype
    assert got.dtype == dtype and got.shape == wanted.shape and got.isfinite().all()
    largest = float(wanted.abs().max())
    stored = 2 * UNIT[dtype] * largest
    assert_near(got, wanted, stored + rounding(ATTENDED, largest))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_q", often_interpreted([1, 2, 5], [1, 5]))
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rows_see_their_context(is_interleaved: bool, num_q: int, dtype: torch.dtype) -> None:
    told = Grouped.make(num_q, dtype)
    told = replace(told, how=told.how._replace(is_interleaved=is_interleaved))
    check(told, told.attend(ours()))
    if dtype == torch.float32:
        check(told, told.attend(TORCH_KERNELS))


@pytest.mark.parametrize("dtype", TYPES)
def test_nodes_of_trees_see_their_bits(dtype: torch.dtype) -> None:
    """Bit masks also reach distant slots, because a beam has more nodes than a pass has rows."""
    told = Grouped.make(3, dtype, room=64)
    context_BQ = told.lens_BQ.amax(1, keepdim=True).expand(-1, 3)
    bits = torch.tensor([1, 1 << 40 | 1 << 7 | 2, 1 << 59 | 1]).expand_as(context_BQ)
    trees = replace(told, how=told.how._replace(bits_BQ=bits), lens_BQ=context_BQ)
    check(trees, trees.attend(ours()))
    if dtype == torch.float32:
        check(trees, trees.attend(TORCH_KERNELS))


@pytest.mark.parametrize("kernels", ["plain", "ours"])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("value", "place"), often_interpreted(BROKEN, BROKEN[:1]))
def test_a_slot_counts_for_the_rows_that_see_it_alone(
    value: float, place: int, is_tree: bool, kernels: str
) -> None:
    """A slot whose key or value is not finite affects only the rows that see it."""
    own, told = (
        TORCH_KERNELS if kernels == "plain" else ours(),
        Grouped.make(4, torch.float32, room=64),
    )
    at_B = told.lens_BQ.amax(1) - 1
    sees_BQ = told.lens_BQ > at_B.unsqueeze(1)
    if is_tree:
        bits_BQ = torch.tensor([1, 3, 5, 7]).expand_as(sees_BQ)
        told = replace(told, how=told.how._replace(bits_BQ=bits_BQ))
        told = replace(told, lens_BQ=told.lens_BQ[:, :1].expand_as(bits_BQ))
        at_B, sees_BQ = told.lens_BQ[:, 0] + 1, bits_BQ >> 1 & 1 == 1
    wanted = told.attend(own).unflatten(0, sees_BQ.shape)
    assert wanted.isfinite().all()
    page_B = told.how.page_table_BP.gather(1, at_B.unsqueeze(1) // PAGE_SIZE).squeeze(1)
    keys, values = told.how.cache.unflatten(-1, (2, GROUPS, WIDTH)).unbind(2)
    (keys if place > 0 else values)[page_B, at_B % PAGE_SIZE, :, place] = value
    got = told.attend(own).unflatten(0, sees_BQ.shape)
    assert torch.equal(got[~sees_BQ], wanted[~sees_BQ])
    assert not got[sees_BQ].isfinite().all(-1).any()


@native_only
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_is_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """A node has the same bits as its path computed as a chain."""
    told = Grouped.make(4, dtype)
    whole = told.attend(ours()).unflatten(0, (-1, 4))
    for b in range(len(CONTEXTS)):
        for i in range(4):
            assert torch.equal(told.rows(b, i).attend(ours())[0], whole[b, i])
    chain = replace(told, lens_BQ=told.lens_BQ.amax(1, keepdim=True).expand(-1, 4))
    context = (chain.lens_BQ - 3).clamp(min=0)
    as_tree = chain.how._replace(bits_BQ=torch.full_like(context, 7).where(context > 0, 1))
    trees = replace(chain, how=as_tree, lens_BQ=context)
    assert torch.equal(trees.attend(ours()), chain.attend(ours()))


@pytest.mark.parametrize("dtype", TYPES)
def test_entries_are_rotated_keys_and_values(dtype: torch.dtype) -> None:
    """Scores of queries and keys depend only on the distance between their positions."""
    generator = torch.Generator().manual_seed(5)
    kv = torch.randn(6, 2 * GROUPS * WIDTH, generator=generator).to(dtype)
    angle = torch.randn(6, WIDTH // 2, generator=generator)
    cache = torch.zeros(3, PAGE_SIZE, 2 * GROUPS * WIDTH, dtype=dtype)
    how = AttentionMetadata(angle.cos(), angle.sin(), False, cache, torch.tensor([[1, 2]]), SCALE)
    slots = torch.tensor([17, 33, 20, 21, 40, 18])
    ours().write_gqa_cache(kv, how, slots)
    keys = rotate(
        kv[:, : GROUPS * WIDTH].unflatten(1, (GROUPS, WIDTH)),
        (how.cos[:, None], how.sin[:, None]),
        False,
    )
    wanted = torch.cat((keys.flatten(1), kv[:, GROUPS * WIDTH :]), 1)
    # Two products and their sum are rounded; in fp32 they may be rounded only once.
    bound = 2 * UNIT[dtype] * wanted.double().abs() + rounding(3, float(kv.abs().max()))
    assert_near(cache.flatten(0, 1)[slots], wanted, bound)
    assert torch.equal(cache.flatten(0, 1)[slots][:, GROUPS * WIDTH :], kv[:, GROUPS * WIDTH :])
    assert int((cache != 0).any(2).sum()) == 6
