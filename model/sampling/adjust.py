"""What a request does to its logits before a token is chosen: bias, penalties, no early end.

Counts are a pure function of (prompt, output ids, drafts before a place), so penalties see
exactly the tokens that plain decoding would have seen.
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
    """Rules of B rows; the first axis of every field is the row.

    ``in_prompt_BV`` and ``ends_BV`` (tokens that would end the answer) are masks, ``count_BV``
    how often a token is in the output, ``bias_BV`` is added to the logits.
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
    """Rows that leave their logits as they are."""

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
    """Write ``request``'s rules and counts over whatever the row held; ``output_ids`` are all
    tokens emitted so far, ``stops`` the tokens that end the answer."""

    def ids(tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64)

    sampling, vocab_size, device = request.sampling, rules.count_BV.shape[1], rules.count_BV.device
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
    """Logits [B, V] of the token after ``num_output_B`` emitted ones and ``drafts_BN``. If but
    some of them are ``seen_BN``, their number is in ``num_output_B`` already.

    Bias, then repetition (prompt and output), frequency and presence (output) penalties, as
    vLLM has them; before ``min_tokens`` what would end the answer is -inf.
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
