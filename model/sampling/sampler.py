"""Sampling of tokens from logits, as pure functions of tensors.

With strict acceptance, a sampled token depends only on (checkpoint, request, seed, output index).
It does not depend on the batch, the draft length, disaggregation or migration.

Shape legend: B rows, Q positions of each, N drafts before a position, N1 = N + 1 positions, V
vocabulary, X any axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.request import SamplingParams
from tandem.model.checkpoint.tensors import upload
from tandem.model.network.tree import Tree, on_path
from tandem.model.sampling.adjust import AdjustRows, adjust

TARGET, DRAFT, COIN, RESIDUAL = range(4)
"""Noise streams, independent at the same (seed, output index). Only rejection sampling uses other
streams than TARGET."""
_MASK = 0xFFFFFFFF
_STREAM_SHIFT = 30


class Sampler:
    """Sampling operations of a device. This class is the torch implementation for any device. The
    classes in model/kernels derive from it."""

    adjust: Callable[..., Tensor] = staticmethod(adjust)
    """Function that applies the logit rules of each row (adjust.py)."""

    def argmax_tokens(self, adjusted_XV: Tensor) -> Tensor:
        """Return the ids [X] of the tokens with the largest logits; the first one among equals."""
        return adjusted_XV.argmax(-1)

    def are_finite(self, adjusted_XV: Tensor) -> Tensor:
        """Return whether the largest logit of each position is finite and no logit is NaN: bool
        [X].

        Single tokens may be forbidden (-inf), but not all of them.
        """
        return adjusted_XV.amax(-1).abs() < float("inf")

    def sample_tokens(
        self, adjusted_BQV: Tensor, rows: "SamplingRows", output_index_BQ: Tensor
    ) -> Tensor:
        """Return the token ids [B, Q] that ``draw`` chooses, in batches with at least one sampled
        row."""
        kept_BQV = _kept_logits(adjusted_BQV, rows)
        seed_B1 = rows.seed_B.unsqueeze(1)
        drawn_BQ = sample(kept_BQV, seed_B1, output_index_BQ)
        greedy_BQ = adjusted_BQV.argmax(-1)
        return torch.where(rows.temperature_B.unsqueeze(1) > 0, drawn_BQ, greedy_BQ)

    def filtered_log_probs(self, logits_BQV: Tensor, rows: "SamplingRows") -> Tensor:
        """Return log p [B, Q, V] after temperature and filters; -inf for tokens that were filtered
        out."""
        return _kept_logits(logits_BQV, rows).log_softmax(-1)


def _kept_logits(logits_BQV: Tensor, rows: "SamplingRows") -> Tensor:
    """Return the logits [B, Q, V] after temperature, top-k, top-p and min-p, in this order.

    The row maximum is subtracted; filtered tokens are -inf. Top-p keeps the smallest set of best
    tokens whose mass reaches p. Min-p keeps tokens of at least min_p times the best token's
    probability. The best token always stays. Among equal logits the lower id ranks first. Masses
    are summed in fp64.
    """
    columns = rows.temperature_B, rows.top_k_B, rows.top_p_B.double(), rows.min_p_B.double()
    temperature, top_k, top_p, min_p = (column.view(-1, 1, 1) for column in columns)
    x_BQV = logits_BQV / torch.where(temperature > 0, temperature, 1.0)
    x_BQV = x_BQV - x_BQV.amax(-1, keepdim=True)
    sorted_BQV, order = x_BQV.sort(dim=-1, descending=True, stable=True)
    mass_BQV = sorted_BQV.double().exp()
    rank_V = torch.arange(x_BQV.shape[2], device=x_BQV.device)
    keep_V = (rank_V < top_k) | (top_k <= 0)
    mass_kept = mass_BQV * keep_V
    is_below = mass_kept.cumsum(-1) - mass_BQV < top_p * mass_kept.sum(-1, keepdim=True)
    keep_V = keep_V & (is_below | (top_p >= 1)) & (mass_BQV >= min_p) | (rank_V == 0)
    kept_BQV = torch.zeros_like(keep_V).scatter(-1, order, keep_V)
    return x_BQV.masked_fill(~kept_BQV, float("-inf"))


TORCH_SAMPLER = Sampler()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of B rows.

    Attributes:
        temperature_B: Temperature; 0 is greedy.
        top_k_B: Number of tokens that top-k keeps; 0 is off.
        top_p_B: Probability mass that top-p keeps; 1 is off.
        min_p_B: Minimum probability relative to the best token; 0 is off.
        seed_B: Seeds, int64.
        all_greedy: True if all rows have temperature 0. The host knows this flag, so it can leave
            out the noise altogether.
        rules: Logit rules; None skips them if no row has any.
        sampler: Sampling operations of the device.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    all_greedy: bool
    rules: AdjustRows | None = None
    sampler: Sampler = TORCH_SAMPLER

    @classmethod
    def of(
        cls,
        settings: Sequence[SamplingParams],
        device: torch.device,
        rules: AdjustRows | None = None,
        sampler: Sampler = TORCH_SAMPLER,
    ) -> "SamplingRows":
        """Build one row per request and upload it. Seeds must be set; ``rules`` may still be on the
        host."""

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(row, name) for row in settings], dtype=dtype)

        rows = cls(
            temperature_B=column("temperature", torch.float32),
            top_k_B=column("top_k", torch.int64),
            top_p_B=column("top_p", torch.float32),
            min_p_B=column("min_p", torch.float32),
            seed_B=column("seed", torch.int64),
            all_greedy=all(row.temperature == 0 for row in settings),
            rules=rules,
            sampler=sampler,
        )
        return upload(rows, device)


def apply_rules(
    logits_BV: Tensor, rows: SamplingRows, num_output_B: Tensor, drafts_BN: Tensor
) -> Tensor:
    """Apply the rows' logit rules, if any, and return the logits [B, V].

    The position follows ``num_output_B`` emitted tokens and ``drafts_BN`` (N may be 0).
    """
    if rows.rules is None:
        return logits_BV
    return rows.sampler.adjust(
        logits_BV=logits_BV, rules=rows.rules, num_output_B=num_output_B, drafts_BN=drafts_BN
    )


def draw(adjusted_BV: Tensor, rows: SamplingRows, index_B: Tensor) -> Tensor:
    """Choose token ids [B]: argmax for temperature 0, otherwise a sample of the filtered
    distribution.

    Adding Gumbel noise and taking the argmax samples exactly from p. The noise is a function of
    (seed, output index, token id) alone.
    """
    if rows.all_greedy:
        return rows.sampler.argmax_tokens(adjusted_BV)
    return rows.sampler.sample_tokens(adjusted_BV.unsqueeze(1), rows, index_B.unsqueeze(1)).squeeze(
        1
    )


def apply_rules_at_places(
    logits_BN1V: Tensor,
    rows: SamplingRows,
    num_output_B: Tensor,
    drafts_BN: Tensor,
    tree: Tree | None = None,
) -> Tensor:
    """Apply the logit rules at every position of a chain or node of a tree: [B, N1, V].

    At each position, the drafts before it count as output.
    """
    if rows.rules is None:
        return logits_BN1V
    places = logits_BN1V.unbind(1)
    own = rows.sampler.adjust
    if tree is None:
        many = [
            apply_rules(
                logits_BV=x, rows=rows, num_output_B=num_output_B, drafts_BN=drafts_BN[:, :i]
            )
            for i, x in enumerate(places)
        ]
        return torch.stack(many, 1)
    seen_BQN, num_BQ = on_path(tree.bits_BQ, drafts_BN.shape[1]), tree.depth_BQ
    nodes = zip(places, num_BQ.unbind(1), seen_BQN.unbind(1), strict=True)
    many = [own(x, rows.rules, num_output_B + n_B, drafts_BN, seen) for x, n_B, seen in nodes]
    return torch.stack(many, 1)


def draw_at_places(
    adjusted_BN1V: Tensor, rows: SamplingRows, num_output_B: Tensor, tree: Tree | None = None
) -> Tensor:
    """Choose a token at every position of a chain or node of a tree: [B, N1]. A node uses the noise
    of the output index at its depth."""
    if rows.all_greedy:
        return rows.sampler.argmax_tokens(adjusted_BN1V)
    num_places = adjusted_BN1V.shape[1]
    device = num_output_B.device
    depth_BN1 = torch.arange(num_places, device=device) if tree is None else tree.depth_BQ
    return rows.sampler.sample_tokens(adjusted_BN1V, rows, num_output_B.unsqueeze(1) + depth_BN1)


def sample(log_p: Tensor, seed: Tensor, output_index: Tensor, stream: int = TARGET) -> Tensor:
    """Sample token ids from ``log_p`` [.., V], which need not be normalised."""
    return (
        log_p
        + gumbel(seed=seed, output_index=output_index, vocab_size=log_p.shape[-1], stream=stream)
    ).argmax(-1)


def gumbel(seed: Tensor, output_index: Tensor, vocab_size: int, stream: int = TARGET) -> Tensor:
    """Return standard Gumbel noise [.., V] in fp32.

    The noise comes from a counter-based hash and is the same on all devices. Seeds and indices
    broadcast.
    """
    token_V = torch.arange(vocab_size, device=seed.device, dtype=torch.int64)
    key = _key(seed, output_index, stream).unsqueeze(-1)
    return -torch.log(-torch.log1p(-_unit(key, token_V))).float()


def uniform(seed: Tensor, output_index: Tensor, stream: int) -> Tensor:
    """Return fp64 numbers strictly between 0 and 1 from the same hash as ``gumbel``; shapes
    broadcast."""
    key = _key(seed, output_index, stream)
    return _unit(key, torch.zeros_like(key))


def _key(seed: Tensor, output_index: Tensor, stream: int) -> Tensor:
    """Hash (seed, output index, stream). The stream takes bits 30 and 31, above any output
    index."""
    counter = output_index ^ (stream << _STREAM_SHIFT)
    return _mix(_mix(_mix(seed & _MASK) ^ ((seed >> 32) & _MASK)) ^ (counter & _MASK))


def _unit(key: Tensor, counter: Tensor) -> Tensor:
    """Hash a counter to an fp64 number strictly between 0 and 1."""
    return (_mix(_mix(key ^ counter) ^ (key >> 16)).double() + 0.5) / (_MASK + 1)


def _mix(x: Tensor) -> Tensor:
    """Avalanche 32 bits held in int64 (the multiply-xorshift finaliser "lowbias32")."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)
