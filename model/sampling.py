"""Logits to tokens: pure functions of tensors, so that a sampled token depends on nothing but
(checkpoint, request, seed, output index): not on batch, draft length, split or migration.

Shape legend: B rows, N drafts before a place, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.adjust import AdjustRows, adjust

_MASK = 0xFFFFFFFF


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

    @property
    def plain(self) -> bool:
        """Whether every row takes the argmax of its raw logits."""
        return self.all_greedy and self.rules is None


def choose(
    logits_BV: Tensor, rows: SamplingRows, num_output_B: Tensor, drafts_BN: Tensor
) -> Tensor:
    """Token ids [B] after ``num_output_B`` emitted tokens and ``drafts_BN`` (N may be 0).

    argmax for temperature 0, else argmax(log p + Gumbel noise): that draws exactly from p
    (design.md, Sampling), and noise is a function of (seed, output index, token id) alone.
    """
    if rows.rules is not None:
        logits_BV = adjust(logits_BV, rows.rules, num_output_B, drafts_BN)
    greedy_B = logits_BV.argmax(-1)
    if rows.all_greedy:
        return greedy_B
    log_p = filtered_log_probs(logits_BV, rows)
    output_index_B = num_output_B + drafts_BN.shape[1]
    noisy = log_p + gumbel(rows.seed_B, output_index_B, logits_BV.shape[-1])
    return torch.where(rows.temperature_B > 0, noisy.argmax(-1), greedy_B)


def filtered_log_probs(logits_BV: Tensor, rows: SamplingRows) -> Tensor:
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
    kept &= (mass_before < rows.top_p_B.unsqueeze(1) * mass_k) | (rows.top_p_B >= 1).unsqueeze(1)
    kept &= probs >= rows.min_p_B.unsqueeze(1) * probs[:, :1]
    kept |= rank == 0
    kept_BV = torch.zeros_like(kept).scatter(1, order, kept)
    return log_p.masked_fill(~kept_BV, float("-inf")).log_softmax(-1)


def gumbel(seed_B: Tensor, output_index_B: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] fp32 from a counter-based hash; the same on any device."""
    token_V = torch.arange(vocab_size, device=seed_B.device, dtype=torch.int64)
    key_B = _mix(_mix(_mix(seed_B & _MASK) ^ ((seed_B >> 32) & _MASK)) ^ (output_index_B & _MASK))
    bits_BV = _mix(_mix(key_B.unsqueeze(1) ^ token_V) ^ (key_B.unsqueeze(1) >> 16))
    v = (bits_BV.double() + 0.5) / (_MASK + 1)
    return -torch.log(-torch.log1p(-v)).float()


def _mix(x: Tensor) -> Tensor:
    """Avalanche 32 bits held in int64 (the multiply-xorshift finaliser "lowbias32")."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)
