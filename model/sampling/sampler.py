"""Logits to tokens: pure functions of tensors, so that a sampled token depends on nothing but
(checkpoint, request, seed, output index): not on batch, draft length, split or migration.

Shape legend: B rows, N drafts before a place, N1 = N + 1 places, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.request import SamplingParams
from model.checkpoint.tensors import upload
from model.network.tree import Tree, on_path
from model.sampling.adjust import AdjustRows, adjust

TARGET, DRAFT, COIN, RESIDUAL = range(4)
"""Streams of noise, independent at the same (seed, output index); only rejection sampling has
more than the first."""
_MASK = 0xFFFFFFFF
_STREAM_SHIFT = 30


class Sampler:
    """How a device draws; here in terms of torch, for any (model/kernels)."""

    def drawn(self, adjusted_BV: Tensor, rows: "SamplingRows", output_index_B: Tensor) -> Tensor:
        """`draw` of rows of which some are sampled: token ids [B]."""
        greedy_B = adjusted_BV.argmax(-1)
        log_p = self.filtered_log_probs(adjusted_BV, rows)
        drawn_B = sample(log_p, rows.seed_B, output_index_B)
        return torch.where(rows.temperature_B > 0, drawn_B, greedy_B)

    def filtered_log_probs(self, logits_BV: Tensor, rows: "SamplingRows") -> Tensor:
        """log p [B, V] after temperature, then top-k, top-p, min-p; -inf where filtered out.

        top-p keeps the smallest set of best tokens whose mass reaches p; min-p keeps tokens of at
        least min_p times the best token's probability. The best token always stays.
        """
        safe_temperature = torch.where(rows.temperature_B > 0, rows.temperature_B, 1.0)
        log_p = (logits_BV / safe_temperature.unsqueeze(1)).log_softmax(-1)
        sorted_log_p, order = log_p.sort(dim=-1, descending=True, stable=True)
        probs = sorted_log_p.exp()
        rank = torch.arange(log_p.shape[1], device=log_p.device).unsqueeze(0)
        top_k = torch.where(rows.top_k_B > 0, rows.top_k_B, log_p.shape[1]).unsqueeze(1)
        kept = rank < top_k
        mass_k = (probs * kept).sum(-1, keepdim=True)
        mass_before = (probs * kept).cumsum(-1) - probs
        is_below = mass_before < rows.top_p_B.unsqueeze(1) * mass_k
        kept &= is_below | (rows.top_p_B >= 1).unsqueeze(1)
        kept &= probs >= rows.min_p_B.unsqueeze(1) * probs[:, :1]
        kept |= rank == 0
        kept_BV = torch.zeros_like(kept).scatter(1, order, kept)
        return log_p.masked_fill(~kept_BV, float("-inf")).log_softmax(-1)


PLAIN_SAMPLER = Sampler()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of B rows. ``seed_B`` int64; ``top_k_B`` 0 is off.

    ``all_greedy`` is known on the host and skips the noise altogether; so is ``rules`` None,
    which no row adjusts its logits with.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    all_greedy: bool
    rules: AdjustRows | None = None
    sampler: Sampler = PLAIN_SAMPLER

    @classmethod
    def of(
        cls,
        settings: Sequence[SamplingParams],
        device: torch.device,
        rules: AdjustRows | None = None,
        sampler: Sampler = PLAIN_SAMPLER,
    ) -> "SamplingRows":
        """The settings of several requests, one row each; seeds are given by now. ``rules`` may
        be on the host still."""

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(one, name) for one in settings], dtype=dtype)

        rows = cls(
            temperature_B=column("temperature", torch.float32),
            top_k_B=column("top_k", torch.int64),
            top_p_B=column("top_p", torch.float32),
            min_p_B=column("min_p", torch.float32),
            seed_B=column("seed", torch.int64),
            all_greedy=all(one.temperature == 0 for one in settings),
            rules=rules,
            sampler=sampler,
        )
        return upload(rows, device)


def adjusted(
    logits_BV: Tensor, rows: SamplingRows, num_output_B: Tensor, drafts_BN: Tensor
) -> Tensor:
    """Logits [B, V] after the rows' rules, if any has some, of the token that comes after
    ``num_output_B`` emitted ones and ``drafts_BN`` (N may be 0)."""
    if rows.rules is None:
        return logits_BV
    return adjust(logits_BV, rows.rules, num_output_B, drafts_BN)


def draw(adjusted_BV: Tensor, rows: SamplingRows, output_index_B: Tensor) -> Tensor:
    """Token ids [B]: argmax for temperature 0, else argmax(log p + Gumbel noise).

    That draws exactly from p (design.md, Sampling), and noise is a function of (seed, output
    index, token id) alone.
    """
    if rows.all_greedy:
        return adjusted_BV.argmax(-1)
    return rows.sampler.drawn(adjusted_BV, rows, output_index_B)


def adjusted_places(
    logits_BN1V: Tensor,
    rows: SamplingRows,
    num_output_B: Tensor,
    drafts_BN: Tensor,
    tree: Tree | None = None,
) -> Tensor:
    """``adjusted`` at every place of a chain or node of a tree [B, N+1, V], given the drafts before
    it."""
    if rows.rules is None:
        return logits_BN1V
    places = logits_BN1V.unbind(1)
    if tree is None:
        many = [adjusted(x, rows, num_output_B, drafts_BN[:, :i]) for i, x in enumerate(places)]
        return torch.stack(many, 1)
    seen_BQN, num_BQ = on_path(tree.bits_BQ, drafts_BN.shape[1]), tree.depth_BQ
    nodes = zip(places, num_BQ.unbind(1), seen_BQN.unbind(1), strict=True)
    many = [
        adjust(x, rows.rules, num_output_B + num_B, drafts_BN, seen_BN)
        for x, num_B, seen_BN in nodes
    ]
    return torch.stack(many, 1)


def draw_places(
    adjusted_BN1V: Tensor, rows: SamplingRows, num_output_B: Tensor, tree: Tree | None = None
) -> Tensor:
    """``draw`` at every place of a chain or node of a tree [B, N+1]: its noise is that of its
    depth."""
    if rows.all_greedy:
        return adjusted_BN1V.argmax(-1)
    places = adjusted_BN1V.unbind(1)
    depths: Iterable[Any] = range(len(places)) if tree is None else tree.depth_BQ.unbind(1)
    drawn = [draw(x, rows, num_output_B + i) for x, i in zip(places, depths, strict=True)]
    return torch.stack(drawn, 1)


def sample(
    log_p_BV: Tensor, seed_B: Tensor, output_index_B: Tensor, stream: int = TARGET
) -> Tensor:
    """Token ids [B] drawn from ``log_p_BV``, which need not be normalised."""
    noise_BV = gumbel(seed_B, output_index_B, log_p_BV.shape[-1], stream)
    return (log_p_BV + noise_BV).argmax(-1)


def gumbel(seed_B: Tensor, output_index_B: Tensor, vocab_size: int, stream: int = TARGET) -> Tensor:
    """Standard Gumbel noise [B, V] fp32 from a counter-based hash; the same on any device."""
    token_V = torch.arange(vocab_size, device=seed_B.device, dtype=torch.int64)
    key_B1 = _key(seed_B, output_index_B, stream).unsqueeze(1)
    return -torch.log(-torch.log1p(-_unit(key_B1, token_V))).float()


def uniform(seed: Tensor, output_index: Tensor, stream: int) -> Tensor:
    """Numbers in (0, 1), never 0 or 1, fp64, from the same hash; shapes broadcast."""
    key = _key(seed, output_index, stream)
    return _unit(key, torch.zeros_like(key))


def _key(seed: Tensor, output_index: Tensor, stream: int) -> Tensor:
    """The stream takes the two bits above any output index."""
    place = output_index ^ (stream << _STREAM_SHIFT)
    return _mix(_mix(_mix(seed & _MASK) ^ ((seed >> 32) & _MASK)) ^ (place & _MASK))


def _unit(key: Tensor, counter: Tensor) -> Tensor:
    bits = _mix(_mix(key ^ counter) ^ (key >> 16))
    return (bits.double() + 0.5) / (_MASK + 1)


def _mix(x: Tensor) -> Tensor:
    """Avalanche 32 bits held in int64 (the multiply-xorshift finaliser "lowbias32")."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)
