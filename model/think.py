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
_NO_TOKEN = -1


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
    return torch.stack(_phases(thinking_B, drafts_BN[:, :-1], think_ids), 1)


def phase_after(
    thinking_B: Tensor, tokens_BM: Tensor, num_emitted_B: Tensor, think_ids: ThinkIds | None
) -> Tensor:
    """The phase [B] after the first ``num_emitted_B`` of ``tokens_BM``."""
    if think_ids is None:
        return thinking_B
    place_M = torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
    emitted_BM = tokens_BM.masked_fill(place_M >= num_emitted_B.unsqueeze(1), _NO_TOKEN)
    return _phases(thinking_B, emitted_BM, think_ids)[-1]


def _phases(thinking_B: Tensor, tokens_BM: Tensor, think_ids: ThinkIds) -> list[Tensor]:
    """Before the tokens, and after each of them."""
    begin, end = think_ids
    begins_BM, stays_BM = tokens_BM == begin, tokens_BM != end
    phases = [thinking_B]
    for begins_B, stays_B in zip(begins_BM.unbind(1), stays_BM.unbind(1), strict=True):
        phases.append((phases[-1] | begins_B) & stays_B)
    return phases
