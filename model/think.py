"""The thinking part of an answer: which tokens begin and end it, and whether a place is inside.

The last of the two tokens before a place decides, in the prompt or in the answer.
Shape legend: B rows, N drafts, M tokens a step can emit at most.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from model.tokenizer import read_tokenizer

ThinkIds = tuple[int, int]
"""The tokens that begin and end the thinking part."""


def read_think_ids(path: Path, names: tuple[str, str]) -> ThinkIds | None:
    """Token ids of ``names`` in the checkpoint's tokenizer.json; None if that is not there or
    one of them is not a single token of it.

    Raises ValueError naming the file when it cannot be read.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        return None
    begin, end = (tokenizer.token_to_id(name) for name in names)
    return None if begin is None or end is None else (begin, end)


def thinking_at_start(
    prompt_ids: Sequence[int], output_ids: Sequence[int], think_ids: ThinkIds | None
) -> bool:
    """Whether the token after ``output_ids`` is inside the thinking part."""
    if think_ids is None:
        return False
    backwards = chain(reversed(output_ids), reversed(prompt_ids))
    return next((token == think_ids[0] for token in backwards if token in think_ids), False)


def thinking_before(thinking_B: Tensor, drafts_BN: Tensor, think_ids: ThinkIds | None) -> Tensor:
    """The phase [B, N] of each draft's place; ``thinking_B`` is that of the first."""
    if think_ids is None or drafts_BN.shape[1] == 0:
        return thinking_B.unsqueeze(1).expand(drafts_BN.shape)
    columns = [thinking_B]
    for draft_B in drafts_BN[:, :-1].unbind(1):
        columns.append(_follow(columns[-1], draft_B, think_ids))
    return torch.stack(columns, 1)


def phase_after(
    thinking_B: Tensor, tokens_BM: Tensor, num_emitted_B: Tensor, think_ids: ThinkIds | None
) -> Tensor:
    """The phase [B] after the first ``num_emitted_B`` of ``tokens_BM``."""
    if think_ids is None:
        return thinking_B
    for i, token_B in enumerate(tokens_BM.unbind(1)):
        after_B = _follow(thinking_B, token_B, think_ids)
        thinking_B = torch.where(i < num_emitted_B, after_B, thinking_B)
    return thinking_B


def _follow(thinking_B: Tensor, token_B: Tensor, think_ids: ThinkIds) -> Tensor:
    begin, end = think_ids
    return (thinking_B | (token_B == begin)) & (token_B != end)
