"""Tokens drawn from adjusted logits, or what they are drawn from (model/sampling/sampler.py: what
is drawn). Rows are split over programs, whose launches follow one another; who is kept, edges.py
tells, without sorting.

Sums are in a fixed order, the same whatever else there is. They differ from torch's in their last
bits, so that a token on the very edge of top-p may fall to the other side.

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
    """Token ids [B, Q] int64, the lowest among equals."""
    launch = _Launch(adjusted_BQV)
    settings, left = launch.find_edges(rows, draws=True)
    best_XS = torch.empty_like(left[0])
    launch(_score, settings, left, rows.seed_B, output_index_BQ.contiguous(), best_XS)
    return launch.merge_splits(best_XS)


def filtered_log_probs(logits_BQV: Tensor, rows: SamplingRows) -> Tensor:
    """log p [B, Q, V] of what is left, fp32."""
    launch = _Launch(logits_BQV)
    settings, left = launch.find_edges(rows, draws=False)
    total_XS = torch.empty_like(left[0], dtype=torch.float32)
    out_BQV = logits_BQV.new_empty(logits_BQV.shape, dtype=torch.float32)
    launch(_weigh, settings, left, total_XS)
    launch(_filter, settings, left, total_XS, out_BQV)
    return out_BQV


def argmax_tokens(adjusted_XV: Tensor) -> Tensor:
    """Ids [X] int64 of the largest logits, the lowest among equals, and of NaN where there is no
    number; X any axes."""
    launch = _Launch(adjusted_XV.reshape(1, -1, adjusted_XV.shape[-1]))
    return launch.merge_splits(launch.top_values(None)).view(adjusted_XV.shape[:-1])


class _Launch:
    """Of kernels that have a program for each split of each row of logits. Splits depend on the
    size of the vocabulary alone."""

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
        """The largest of each split [X, S]."""
        top_XS = self._logits[0].new_empty(self._shape, dtype=torch.uint64)
        self(_scan, temperature_B, top_XS)
        return top_XS

    def find_edges(self, rows: SamplingRows, draws: bool) -> tuple[tuple[Tensor, ...], ...]:
        """``how`` and ``left``, when edges are found."""
        settings = rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B
        slots, new = (4, *self._shape), self._logits[0].new_empty
        left = self.top_values(settings[0]), new(*slots, 2, DIGIT.value), new(*slots[:2], 4)
        for step in range(16):
            self(narrow, settings, left, step, DRAWS=draws)
        return settings, left

    def merge_splits(self, best_XS: Tensor) -> Tensor:
        """The tokens [B, Q] of what is best of all splits."""
        num_places = self._logits[3]
        token_BQ = best_XS.new_empty(len(best_XS) // num_places, num_places, dtype=torch.int64)
        _merge[self._shape[0], 1](best_XS, token_BQ, self._shape[1], self._splits, num_warps=1)
        return token_BQ


@triton.jit
def _packed(key_V, at_V):
    """uint64 in the order of keys, and the lowest token is the largest among equals."""
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
    """As model/sampling/sampler.py's, stream TARGET; 1 - u is exact in fp64."""
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
    place = tl.program_id(0).to(tl.int64)
    b = place // logits[3]
    # The token with the largest logit, if no other has a score.
    best = tl.max(load_splits(left[0], 0, SPLITS), 0) & 0xFFFFFFFF
    if tl.load(settings[0] + b) > 0:
        at_V, kept_V = is_kept(logits, settings, left, BLOCK, SPLITS)
        if tl.max(kept_V, 0) > float("-inf"):
            key = _key(tl.load(seeds + b), tl.load(indices + place))
            score_V = kept_V + _gumbel(key, at_V.to(tl.uint32))
            packed_V = _packed(ordered(score_V), at_V)
            best_here = tl.max(tl.where(score_V > float("-inf"), packed_V, 0), 0)
            best = tl.maximum(best, best_here)
    tl.store(bests + place * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def _merge(bests, tokens, num_splits, SPLITS: tl.constexpr):
    place, s_S = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    best_S = tl.load(bests + place * num_splits + s_S, mask=s_S < num_splits, other=0)
    tl.store(tokens + place, 0xFFFFFFFF ^ (tl.max(best_S, 0) & 0xFFFFFFFF).to(tl.int64))


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
