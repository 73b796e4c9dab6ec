"""What drafters remember that read the text: the tokens of each row, prompt and answer [R, T].

Shape legend: B rows, R rows of the memory, T tokens of a row's text, E places that a row may emit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.model.checkpoint.tensors import upload
from tandem.model.drafters.base import Drafter, Emitted


class TextDrafter(Drafter):
    """Its memory is all rows' texts."""

    def create_table(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=device)

    def register_row(self, table: Tensor, row: int, token_ids: Sequence[int]) -> None:
        table[row, : len(token_ids)] = upload(torch.tensor(token_ids), table.device)

    def update_table(
        self, table: Tensor, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted
    ) -> None:
        """What was not emitted is written over by the next step."""
        places_BE = text_positions(emitted, num_known_B, table.shape[1])
        table.index_put_((rows_B.unsqueeze(1), places_BE), emitted.tokens_BE)


def text_positions(emitted: Emitted, num_known_B: Tensor, num_places: int) -> Tensor:
    """Where in rows' texts the tokens of a step stand [B, E]."""
    offsets_E = torch.arange(emitted.tokens_BE.shape[1], device=num_known_B.device)
    first_B1 = (num_known_B - emitted.num_B).unsqueeze(1)
    return (first_B1 + offsets_E).clamp(max=num_places - 1)
