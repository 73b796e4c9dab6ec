"""What drafters remember that read the text: the tokens of each row, prompt and answer [R, T].

Shape legend: B rows, R rows of the memory, T tokens of a row's text, E places that a row may emit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.checkpoint.tensors import upload
from model.drafters.base import Drafter


class ReadsTexts(Drafter):
    """Its memory is all rows' texts."""

    def memory(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=device)

    def enter(self, memory: Tensor, row: int, token_ids: Sequence[int]) -> None:
        memory[row, : len(token_ids)] = upload(torch.tensor(token_ids), memory.device)

    def note(
        self,
        memory: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        tokens_BE: Tensor,
        num_accepted_B: Tensor,
    ) -> None:
        """What was not emitted is written over by the next step."""
        offsets_E = torch.arange(tokens_BE.shape[1], device=rows_B.device)
        first_B1 = (num_known_B - 1 - num_accepted_B).unsqueeze(1)
        places_BE = (first_B1 + offsets_E).clamp(max=memory.shape[1] - 1)
        memory.index_put_((rows_B.unsqueeze(1), places_BE), tokens_BE)
