"""Log probabilities of raw logits, before temperature, filters, bias and penalties.

Shape legend: B rows, N positions of each, K most likely tokens, V vocabulary in X blocks.
"""

from dataclasses import dataclass

from torch import Tensor

from tandem.core.answer import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of the emitted tokens and of the most likely tokens.

    Attributes:
        chosen_BN: Log probability of each emitted token.
        top_ids_BNK: Ids of the K most likely tokens.
        top_BNK: Their log probabilities, in descending order.
    """

    chosen_BN: Tensor
    top_ids_BNK: Tensor
    top_BNK: Tensor

    def of_row(self, row: int, num_tokens: int, num_top: int) -> tuple[TokenLogprobs, ...]:
        """Return the first ``num_tokens`` positions of a row, with ``num_top`` tokens each."""
        columns = self.chosen_BN, self.top_ids_BNK[..., :num_top], self.top_BNK[..., :num_top]
        rows = zip(*(column[row, :num_tokens].tolist() for column in columns), strict=True)
        return tuple(TokenLogprobs(chosen, tuple(ids), tuple(top)) for chosen, ids, top in rows)


def raw_logprobs(logits_BNV: Tensor, tokens_BN: Tensor, num_top: int) -> LogprobRows:
    """Return the log probabilities of ``tokens_BN`` and of the ``num_top`` most likely tokens.

    ``num_top`` may be 0. ``topk`` over a whole vocabulary is slow. Therefore the ``num_top`` blocks
    with the largest maxima, which contain the largest values, are found first. The top values are
    then found within these blocks.
    """
    log_p_BNV = logits_BNV.log_softmax(-1)
    chosen_BN = log_p_BNV.gather(-1, tokens_BN.unsqueeze(-1)).squeeze(-1)
    width = 64 if log_p_BNV.shape[-1] % 64 == 0 else 1
    blocks = log_p_BNV.unflatten(-1, (-1, width))
    block_BNK = blocks.amax(-1).topk(min(num_top, blocks.shape[-2]), dim=-1).indices
    best = blocks.take_along_dim(block_BNK.unsqueeze(-1), dim=-2).flatten(-2)
    top_BNK, at = best.topk(num_top, dim=-1)
    return LogprobRows(chosen_BN, block_BNK.gather(-1, at // width) * width + at % width, top_BNK)
