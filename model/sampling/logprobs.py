"""Log probabilities of raw logits, before temperature, filters, bias and penalties.

Shape legend: B rows, N places of each, K likeliest tokens, V vocabulary in X blocks of W.
"""

from dataclasses import dataclass

from torch import Tensor

from core.answer import TokenLogprobs

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """``chosen_BN`` are of the tokens themselves; ``top_BNK`` falls along K."""

    chosen_BN: Tensor
    top_ids_BNK: Tensor
    top_BNK: Tensor

    def of_row(self, row: int, num_tokens: int, num_top: int) -> tuple[TokenLogprobs, ...]:
        """The first ``num_tokens`` places of a row as they are told."""
        chosen = self.chosen_BN[row, :num_tokens].tolist()
        top_ids = self.top_ids_BNK[row, :num_tokens, :num_top].tolist()
        top = self.top_BNK[row, :num_tokens, :num_top].tolist()
        return tuple(
            TokenLogprobs(logprob, tuple(ids), tuple(values))
            for logprob, ids, values in zip(chosen, top_ids, top, strict=True)
        )


def raw_logprobs(logits_BNV: Tensor, tokens_BN: Tensor, num_top: int) -> LogprobRows:
    """Log probabilities of ``tokens_BN`` and of the ``num_top`` likeliest tokens (0 is fine)."""
    log_p_BNV = logits_BNV.log_softmax(-1)
    chosen_BN = log_p_BNV.gather(-1, tokens_BN.unsqueeze(-1)).squeeze(-1)
    return LogprobRows(chosen_BN, *_largest(log_p_BNV, num_top))


def _largest(x_BNV: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Ids and values as of ``topk``, which is slow over a vocabulary: the largest are in those
    blocks whose maxima are."""
    if x_BNV.shape[-1] % _BLOCK != 0 or num_top * _BLOCK >= x_BNV.shape[-1]:
        values, ids = x_BNV.topk(num_top, dim=-1)
        return ids, values
    blocks_BNXW = x_BNV.unflatten(-1, (-1, _BLOCK))
    block_BNK = blocks_BNXW.amax(-1).topk(num_top, dim=-1).indices
    best_BNKW = blocks_BNXW.take_along_dim(block_BNK.unsqueeze(-1), dim=-2)
    values, at = best_BNKW.flatten(-2).topk(num_top, dim=-1)
    return block_BNK.gather(-1, at // _BLOCK) * _BLOCK + at % _BLOCK, values
