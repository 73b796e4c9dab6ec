"""Base class of drafters that read the text. Their table [R, T] has the prompt and output tokens of
each row.

Shape legend: B rows, R rows of the table, T tokens of a row's text, E tokens that a row may emit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.model.checkpoint.tensors import upload
from tandem.model.drafters.base import Drafter, Emitted


class TextDrafter(Drafter):
    """A drafter whose table holds the texts of all rows."""

    def create_table(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=device)

    def register_row(self, table: Tensor, row: int, token_ids: Sequence[int]) -> None:
        table[row, : len(token_ids)] = upload(torch.tensor(token_ids), table.device)

    def update_table(
        self, table: Tensor, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted
    ) -> None:
        """Write all E tokens of the step; the next step overwrites those that were not emitted."""
        places_BE = text_positions(emitted, num_known_B, table.shape[1])
        table.index_put_((rows_B.unsqueeze(1), places_BE), emitted.tokens_BE)


def text_positions(emitted: Emitted, num_known_B: Tensor, num_places: int) -> Tensor:
    """Return the positions [B, E] of a step's tokens in the texts of their rows."""
    offsets_E = torch.arange(emitted.tokens_BE.shape[1], device=num_known_B.device)
    first_B1 = (num_known_B - emitted.num_B).unsqueeze(1)
    return (first_B1 + offsets_E).clamp(max=num_places - 1)
