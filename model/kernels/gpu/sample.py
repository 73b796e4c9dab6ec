"""Tokens drawn from adjusted logits, or what they are drawn from, one program a row
(model/sampling/sampler.py: what is drawn).

Nothing is sorted: the least logit that top-k and top-p leave is found by halving, on bits that have
the order of the numbers. Sums of probabilities differ from torch's in their last bits, so that a
token on the very edge of top-p may fall to the other side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.sampling.sampler import SamplingRows

TILE = 4096


def draw(adjusted_BQV: Tensor, rows: SamplingRows, output_index_BQ: Tensor) -> Tensor:
    """Token ids [B, Q] int64, the lowest among equals."""
    num_rows, num_places, num_tokens = adjusted_BQV.shape
    logits_BQV, index_BQ = adjusted_BQV.float().contiguous(), output_index_BQ.contiguous()
    tokens_BQ = torch.empty_like(index_BQ)
    _draw[(num_rows * num_places,)](
        *(logits_BQV, rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B),
        *(rows.seed_B, index_BQ, tokens_BQ, num_places, num_tokens),
        BLOCK=min(TILE, triton.next_power_of_2(num_tokens)),
        num_warps=8,
    )
    return tokens_BQ


def filtered_log_probs(logits_BQV: Tensor, rows: SamplingRows) -> Tensor:
    """log p [B, Q, V] of what is left, fp32."""
    num_rows, num_places, num_tokens = logits_BQV.shape
    logits_BQV = logits_BQV.float().contiguous()
    out_BQV = torch.empty_like(logits_BQV)
    _filter[(num_rows * num_places,)](
        *(logits_BQV, rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B),
        *(out_BQV, num_places, num_tokens),
        BLOCK=min(TILE // 2, triton.next_power_of_2(num_tokens)),
        num_warps=8,
    )
    return out_BQV


@triton.jit
def _ordered(x):
    """uint32 in the order of floats; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


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
def _tile(row, first, BLOCK: tl.constexpr):
    """Places, logits by temperature, and their keys, 0 where there is none."""
    logits, num_tokens, temperature = row
    at_V = first + tl.arange(0, BLOCK)
    is_one_V = at_V < num_tokens
    x_V = tl.load(logits + at_V, mask=is_one_V, other=float("-inf")) / temperature
    return at_V, x_V, tl.where(is_one_V, _ordered(x_V), 0)


@triton.jit
def _edge(row, norm, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which on up there are ``wanted`` tokens, or so much probability."""
    edge = tl.full([], 0, tl.uint32)
    for i in range(32):
        tried = edge | (tl.full([], 1, tl.uint32) << (31 - i))
        there = 0.0
        for first in range(0, row[1], BLOCK):
            _, x_V, key_V = _tile(row, first, BLOCK)
            weight_V = tl.exp(x_V - norm) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            there += tl.sum(tl.where(key_V >= tried, weight_V, 0.0), 0)
        edge = tl.where(there >= wanted, tried, edge)
    return edge


@triton.jit
def _around(row, norm, edge, BLOCK: tl.constexpr):
    """Tokens above a key, what they weigh, and what one on it weighs."""
    num_above, above, on_it = 0.0, 0.0, 0.0
    for first in range(0, row[1], BLOCK):
        _, x_V, key_V = _tile(row, first, BLOCK)
        p_V = tl.exp(x_V - norm)
        num_above += tl.sum((key_V > edge).to(tl.float32), 0)
        above += tl.sum(tl.where(key_V > edge, p_V, 0.0), 0)
        on_it = tl.maximum(on_it, tl.max(tl.where(key_V == edge, p_V, 0.0), 0))
    return num_above, above, on_it


@triton.jit
def _kept(row, norm, top_k, top_p, BLOCK: tl.constexpr):
    """The key above which all is kept, and how many of those that lie on it, the first ones."""
    k = tl.where((top_k > 0) & (top_k < row[1]), top_k, row[1]).to(tl.float32)
    edge = _edge(row, norm, k, False, BLOCK)
    num_above, above, on_it = _around(row, norm, edge, BLOCK)
    num_on_it = k - num_above
    if top_p < 1:
        wanted = top_p * (above + on_it * num_on_it)
        edge_p = _edge(row, norm, wanted, True, BLOCK)
        if edge_p > edge:
            edge, num_on_it = edge_p, k
            num_above, above, on_it = _around(row, norm, edge, BLOCK)
        num_wanted = tl.ceil((wanted - above) / tl.maximum(on_it, 1e-30))
        num_on_it = tl.minimum(num_on_it, tl.maximum(num_wanted, 1.0))
    return edge, num_on_it


@triton.jit
def _largest(row, BLOCK: tl.constexpr):
    """The largest logit by temperature, and its token."""
    largest, token = float("-inf"), tl.full([], 0, tl.int32)
    for first in range(0, row[1], BLOCK):
        _, x_V, _ = _tile(row, first, BLOCK)
        here = tl.max(x_V, 0)
        token = tl.where(here > largest, first + tl.argmax(x_V, 0), token)
        largest = tl.maximum(largest, here)
    return largest, token


@triton.jit
def _filters(row, largest, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """What tells who is kept: the norm, the edge, how many of those on it, the least probability,
    and the largest logit."""
    total = 0.0
    for first in range(0, row[1], BLOCK):
        _, x_V, _ = _tile(row, first, BLOCK)
        total += tl.sum(tl.exp(x_V - largest), 0)
    norm = largest + tl.log(total)
    edge, num_on_it = tl.full([], 0, tl.uint32), 0.0
    if ((top_k > 0) & (top_k < row[1])) | (top_p < 1):
        edge, num_on_it = _kept(row, norm, top_k, top_p, BLOCK)
    return norm, edge, num_on_it, min_p * tl.exp(largest - norm), largest


@triton.jit
def _kept_of(row, first, filters, num_met, BLOCK: tl.constexpr):
    """Of a tile: places, what is kept of it below the largest logit, -inf of what is not, and how
    many on the edge were met by now."""
    norm, edge, num_on_it, least_p, largest = filters
    at_V, x_V, key_V = _tile(row, first, BLOCK)
    is_on_V = (key_V == edge).to(tl.int32)
    num_before_V = num_met + tl.cumsum(is_on_V, 0) - is_on_V
    is_kept_V = (key_V > edge) | ((is_on_V > 0) & (num_before_V < num_on_it))
    is_kept_V &= (tl.exp(x_V - norm) >= least_p) | (x_V == largest)
    kept_V = tl.where(is_kept_V, x_V - largest, float("-inf"))
    return at_V, kept_V, num_met + tl.sum(is_on_V, 0)


@triton.jit
def _draw(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    indices,
    tokens,
    num_places,
    num_tokens,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    b = place // num_places
    temperature = tl.load(temperatures + b)
    is_sampled = temperature > 0
    row = logits + place * num_tokens, num_tokens, tl.where(is_sampled, temperature, 1.0)
    largest, token = _largest(row, BLOCK)
    if is_sampled:
        told = tl.load(top_ks + b), tl.load(top_ps + b), tl.load(min_ps + b)
        filters = _filters(row, largest, told[0], told[1], told[2], BLOCK)
        key = _key(tl.load(seeds + b), tl.load(indices + place))
        best, num_met = float("-inf"), tl.full([], 0, tl.int32)
        for first in range(0, num_tokens, BLOCK):
            at_V, kept_V, num_met = _kept_of(row, first, filters, num_met, BLOCK)
            score_V = kept_V + _gumbel(key, at_V.to(tl.uint32))
            here = tl.max(score_V, 0)
            token = tl.where(here > best, first + tl.argmax(score_V, 0), token)
            best = tl.maximum(best, here)
    tl.store(tokens + place, token.to(tl.int64))


@triton.jit
def _filter(
    logits, temperatures, top_ks, top_ps, min_ps, out, num_places, num_tokens, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    b = place // num_places
    temperature = tl.load(temperatures + b)
    row = logits + place * num_tokens, num_tokens, tl.where(temperature > 0, temperature, 1.0)
    largest, _best = _largest(row, BLOCK)
    told = tl.load(top_ks + b), tl.load(top_ps + b), tl.load(min_ps + b)
    filters = _filters(row, largest, told[0], told[1], told[2], BLOCK)
    total, num_met = 0.0, tl.full([], 0, tl.int32)
    for first in range(0, num_tokens, BLOCK):
        _, kept_V, num_met = _kept_of(row, first, filters, num_met, BLOCK)
        total += tl.sum(tl.exp(kept_V), 0)
    num_met = tl.full([], 0, tl.int32)
    for first in range(0, num_tokens, BLOCK):
        at_V, kept_V, num_met = _kept_of(row, first, filters, num_met, BLOCK)
        where_V = out + place * num_tokens + at_V
        tl.store(where_V, kept_V - tl.log(total), mask=at_V < num_tokens)
