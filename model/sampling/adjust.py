"""Logit rules that a request sets: bias, penalties and min_tokens.

Token counts are a pure function of (prompt, output ids, drafts before a position). Penalties
therefore count exactly the tokens that decoding without drafts would count.
Shape legend: B rows, V vocabulary, N tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.request import Request
from tandem.model.checkpoint.tensors import upload, write_rows


@dataclass(frozen=True, slots=True)
class AdjustRows:
    """Logit rules of B rows; the first axis of every field is the row.

    Attributes:
        in_prompt_BV: True for tokens of the prompt.
        ends_BV: True for tokens that end the output.
        count_BV: Number of occurrences of each token in the output.
        bias_BV: Value added to each logit.
        repetition_B: Repetition penalty; 1 is off.
        presence_B: Presence penalty; 0 is off.
        frequency_B: Frequency penalty; 0 is off.
        min_tokens_B: Minimum number of output tokens.
    """

    in_prompt_BV: Tensor
    ends_BV: Tensor
    count_BV: Tensor
    bias_BV: Tensor
    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor
    min_tokens_B: Tensor


def no_rules(num_rows: int, vocab_size: int, device: torch.device) -> AdjustRows:
    """Return rules that leave the logits of ``num_rows`` rows unchanged."""

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    return AdjustRows(
        in_prompt_BV=zeros(torch.bool, vocab_size),
        ends_BV=zeros(torch.bool, vocab_size),
        count_BV=zeros(torch.int32, vocab_size),
        bias_BV=zeros(torch.float32, vocab_size),
        repetition_B=zeros(torch.float32) + 1,
        presence_B=zeros(torch.float32),
        frequency_B=zeros(torch.float32),
        min_tokens_B=zeros(torch.int64),
    )


def set_rules(
    rules: AdjustRows,
    row: int,
    request: Request,
    output_ids: tuple[int, ...],
    stops: frozenset[int],
) -> None:
    """Overwrite ``row`` with the rules and token counts of ``request``.

    ``output_ids`` are all tokens emitted so far. ``stops`` are the tokens that end the output.
    """

    def ids(tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64)

    sampling = request.sampling
    vocab_size = rules.count_BV.shape[1]
    device = rules.count_BV.device
    new = no_rules(1, vocab_size, torch.device("cpu"))
    new.in_prompt_BV[0, ids(request.prompt_ids)] = True
    new.ends_BV[0, ids(stops)] = True
    new.count_BV[0] = ids(output_ids).bincount(minlength=vocab_size)
    biased = ids(item.token_id for item in sampling.logit_bias)
    new.bias_BV[0, biased] = torch.tensor([item.bias for item in sampling.logit_bias]).float()
    new.repetition_B[0] = sampling.repetition_penalty
    new.presence_B[0] = sampling.presence_penalty
    new.frequency_B[0] = sampling.frequency_penalty
    new.min_tokens_B[0] = sampling.min_tokens
    write_rows(rules, upload(torch.tensor([row]), device), upload(new, device))


def adjust(
    logits_BV: Tensor,
    rules: AdjustRows,
    num_output_B: Tensor,
    drafts_BN: Tensor,
    seen_BN: Tensor | None = None,
) -> Tensor:
    """Return the adjusted logits [B, V] of one position.

    Adds the bias, then applies the repetition penalty (prompt and output tokens) and the frequency
    and presence penalties (output tokens), as vLLM does. Until the output has ``min_tokens``
    tokens, those that would end it get -inf.

    Args:
        logits_BV: Raw logits.
        rules: Rules of the rows.
        num_output_B: Number of emitted tokens before ``drafts_BN``. With ``seen_BN``, it includes
            the drafts that ``seen_BN`` selects.
        drafts_BN: Drafts.
        seen_BN: True for drafts that precede the position. None if all do.
    """
    if seen_BN is None:
        seen_BN, num_output_B = torch.ones_like(drafts_BN), num_output_B + drafts_BN.shape[1]
    count_BV = rules.count_BV.scatter_add(1, drafts_BN, seen_BN.int())
    used_BV = count_BV > 0
    logits_BV = logits_BV + rules.bias_BV
    repetition_BV = torch.where(used_BV | rules.in_prompt_BV, rules.repetition_B.unsqueeze(1), 1.0)
    logits_BV = torch.where(logits_BV > 0, logits_BV / repetition_BV, logits_BV * repetition_BV)
    logits_BV = logits_BV - rules.frequency_B.unsqueeze(1) * count_BV
    logits_BV = logits_BV - rules.presence_B.unsqueeze(1) * used_BV
    too_early_B = num_output_B < rules.min_tokens_B
    return logits_BV.masked_fill(rules.ends_BV & too_early_B.unsqueeze(1), float("-inf"))


def count_emitted(
    rules: AdjustRows, rows_B: Tensor, tokens_BN: Tensor, num_emitted_B: Tensor
) -> None:
    """Add the first ``num_emitted_B`` of ``tokens_BN`` to the counts of ``rows_B``, in place."""
    kept_BN = torch.arange(tokens_BN.shape[1], device=rows_B.device) < num_emitted_B.unsqueeze(1)
    where = (rows_B.unsqueeze(1).expand_as(tokens_BN), tokens_BN)
    rules.count_BV.index_put_(where, kept_BN.int(), accumulate=True)
