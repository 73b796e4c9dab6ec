"""Sampling from adjusted logits, and their filtered distribution (see model/sampling/sampler.py).

Rows are split over programs, in successive launches. Filters need no sort (edges.py). Sums are
computed in a fixed order, independent of the batch. They differ in the last bits from the sums of
the torch implementation. So a token at the edge of top-p may be kept by one implementation and
filtered out by the other.

Shape legend: see edges.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.gpu.edges import DIGIT, is_kept, load_splits, narrow, ordered, tile
from tandem.model.sampling.sampler import SamplingRows

TILE = 2048
NUM_WARPS = 8


def draw(adjusted_BQV: Tensor, rows: SamplingRows, output_index_BQ: Tensor) -> Tensor:
    """Sample token ids [B, Q] int64. Of equal scores the lowest id wins."""
    launch = _Launch(adjusted_BQV)
    settings, left = launch.find_edges(rows, draws=True)
    best_XS = torch.empty_like(left[0])
    launch(_score, settings, left, rows.seed_B, output_index_BQ.contiguous(), best_XS)
    return launch.merge_splits(best_XS)


def filtered_log_probs(logits_BQV: Tensor, rows: SamplingRows) -> Tensor:
    """Return fp32 log probabilities [B, Q, V] after temperature and filters, -inf if filtered."""
    launch = _Launch(logits_BQV)
    settings, left = launch.find_edges(rows, draws=False)
    total_XS = torch.empty_like(left[0], dtype=torch.float32)
    out_BQV = logits_BQV.new_empty(logits_BQV.shape, dtype=torch.float32)
    launch(_weigh, settings, left, total_XS)
    launch(_filter, settings, left, total_XS, out_BQV)
    return out_BQV


def argmax_tokens(adjusted_XV: Tensor) -> Tensor:
    """Return ids [X] int64 of the largest logits, the lowest of equals; X may be several axes.

    NaN counts as less than any number.
    """
    launch = _Launch(adjusted_XV.reshape(1, -1, adjusted_XV.shape[-1]))
    return launch.merge_splits(launch.top_values(None)).view(adjusted_XV.shape[:-1])


class _Launch:
    """Launches kernels with one program per split of a row of logits.

    The splits depend only on the size of the vocabulary.
    """

    def __init__(self, logits_BQV: Tensor) -> None:
        num_rows, num_places, num_tokens = logits_BQV.shape
        logits_BQV = logits_BQV.float()
        if logits_BQV.stride(2) != 1:
            logits_BQV = logits_BQV.contiguous()
        self._logits: tuple[Any, ...] = logits_BQV, *logits_BQV.stride()[:2], num_places, num_tokens
        self._shape = num_rows * num_places, triton.cdiv(num_tokens, TILE)
        self._splits = triton.next_power_of_2(self._shape[1])

    def __call__(self, kernel: Any, *args: Any, **more: Any) -> None:
        sizes = {"BLOCK": TILE, "SPLITS": self._splits, "num_warps": NUM_WARPS}
        kernel[self._shape](self._logits, *args, **sizes, **more)

    def top_values(self, temperature_B: Tensor | None) -> Tensor:
        """Return the largest logit and its token of each split, packed as uint64 [X, S]."""
        top_XS = self._logits[0].new_empty(self._shape, dtype=torch.uint64)
        self(_scan, temperature_B, top_XS)
        return top_XS

    def find_edges(self, rows: SamplingRows, draws: bool) -> tuple[tuple[Tensor, ...], ...]:
        """Find the edges of top-k and top-p. Returns ``settings`` and ``left`` (see edges.py)."""
        settings = rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B
        slots = (4, *self._shape)
        new = self._logits[0].new_empty
        left = self.top_values(settings[0]), new(*slots, 2, DIGIT.value), new(*slots[:2], 4)
        for step in range(16):
            self(narrow, settings, left, step, DRAWS=draws)
        return settings, left

    def merge_splits(self, best_XS: Tensor) -> Tensor:
        """Return the best token [B, Q] over all splits."""
        num_places = self._logits[3]
        token_BQ = best_XS.new_empty(len(best_XS) // num_places, num_places, dtype=torch.int64)
        _merge[self._shape[0], 1](best_XS, token_BQ, self._shape[1], self._splits, num_warps=1)
        return token_BQ


@triton.jit
def _packed(key_V, at_V):
    """Pack key and token into a uint64 whose maximum has the largest key, then the lowest token."""
    return (key_V.to(tl.uint64) << 32) | (0xFFFFFFFF ^ at_V.to(tl.uint32)).to(tl.uint64)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _key(seed, index):
    key = _mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
    return _mix(key ^ index.to(tl.uint32))


@triton.jit
def _gumbel(key, token):
    """Return the Gumbel noise of stream TARGET in model/sampling/sampler.py.

    Unlike sampler.py, this kernel takes log(1 - u) instead of log1p(-u), because 1 - u is exact in
    fp64.
    """
    bits = _mix(_mix(key ^ token) ^ (key >> 16))
    u = (bits.to(tl.float64) + 0.5) / 4294967296.0
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@triton.jit
def _scan(logits, temperatures, tops, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    at_V, x_V = tile(logits, temperatures, BLOCK)
    to = tops + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, tl.max(_packed(ordered(x_V), at_V), 0))


@triton.jit
def _score(
    logits, settings, left, seeds, indices, bests, BLOCK: tl.constexpr, SPLITS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    b = block // logits[3]
    # Default: the token with the largest logit, if no other has a score.
    best = tl.max(load_splits(left[0], 0, SPLITS), 0) & 0xFFFFFFFF
    if tl.load(settings[0] + b) > 0:
        at_V, kept_V = is_kept(logits, settings, left, BLOCK, SPLITS)
        if tl.max(kept_V, 0) > float("-inf"):
            key = _key(tl.load(seeds + b), tl.load(indices + block))
            score_V = kept_V + _gumbel(key, at_V.to(tl.uint32))
            packed_V = _packed(ordered(score_V), at_V)
            best_here = tl.max(tl.where(score_V > float("-inf"), packed_V, 0), 0)
            best = tl.maximum(best, best_here)
    tl.store(bests + block * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def _merge(bests, tokens, num_splits, SPLITS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    s_S = tl.arange(0, SPLITS)
    best_S = tl.load(bests + block * num_splits + s_S, mask=s_S < num_splits, other=0)
    tl.store(tokens + block, 0xFFFFFFFF ^ (tl.max(best_S, 0) & 0xFFFFFFFF).to(tl.int64))


@triton.jit
def _weigh(logits, settings, left, totals, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    _, kept_V = is_kept(logits, settings, left, BLOCK, SPLITS)
    to = totals + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, tl.sum(tl.exp(kept_V), 0))


@triton.jit
def _filter(logits, settings, left, totals, out, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    at_V, kept_V = is_kept(logits, settings, left, BLOCK, SPLITS)
    total = tl.sum(load_splits(totals, 0.0, SPLITS), 0)
    to_V = out + tl.program_id(0).to(tl.int64) * logits[4] + at_V
    tl.store(to_V, kept_V - tl.log(total), mask=at_V < logits[4])
