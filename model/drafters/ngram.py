"""Drafts from the text itself: what came after the place where its last tokens stood before (prompt
lookup decoding; spec of its options: TensorRT-LLM's n-gram drafter).

Shape legend: B rows, T tokens of a row's text, N drafts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import SpeculationConfig
from core.levels import Level
from model.checkpoint.weights import Checkpoint
from model.drafters.base import Drafts, View
from model.drafters.texts import ReadsTexts
from model.network.cache import Caches
from model.network.deepseek import DeepseekV3


class NgramDrafter(ReadsTexts):
    """The longest n-gram that ends the text and stood in it before, up to ``most_size`` tokens;
    its ``oldest`` place, or the newest one that as many tokens follow as are to be drafted."""

    name = "ngram"

    def __init__(self, most_size: int, *, oldest: bool) -> None:
        self._most_size, self._oldest = most_size, oldest

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, asked: SpeculationConfig
    ) -> "NgramDrafter":
        """Of several places that are not all kept the oldest is: no other has a longer rest."""
        oldest = asked.is_use_oldest or not asked.is_keep_all
        return cls(asked.max_matching_ngram_size, oldest=oldest)

    def draft(self, own: None, view: View, level: Level, amount: int, caches: Caches) -> Drafts:
        text_BT = view.memory.index_select(0, view.rows_B)
        how = self._most_size, level.num_nodes
        return Drafts(*continued(text_BT, view.num_known_B, *how, oldest=self._oldest))


def continued(
    text_BT: Tensor, num_known_B: Tensor, most_size: int, num_drafts: int, *, oldest: bool
) -> tuple[Tensor, Tensor]:
    """What follows the best earlier place in each text, of which ``num_known_B`` tokens count:
    [B, N], and how many of them are text."""
    num_places = text_BT.shape[1]
    known_B1, place_T = num_known_B.unsqueeze(1), torch.arange(num_places, device=text_BT.device)
    goes_on_BT, size_BT = place_T < known_B1, torch.zeros_like(text_BT)
    for i in range(most_size):
        token_B1 = text_BT.gather(1, (known_B1 - 1 - i).clamp(min=0))
        same_BT = F.pad(text_BT == token_B1, (i + 1, 0))[:, :num_places]
        goes_on_BT = goes_on_BT & same_BT
        size_BT = size_BT + goes_on_BT
    order_BT = num_places - 1 - place_T.expand_as(text_BT)
    if not oldest:
        is_whole_BT = place_T + num_drafts <= known_B1
        order_BT = place_T + is_whole_BT * num_places
    best_B1 = (size_BT * (2 * num_places) + order_BT).argmax(1, keepdim=True)
    num_B1 = (known_B1 - best_B1).clamp(max=num_drafts)
    num_B1 = num_B1.where(size_BT.gather(1, best_B1) > 0, 0)
    places_BN = best_B1 + torch.arange(num_drafts, device=text_BT.device)
    return text_BT.gather(1, places_BN.clamp(max=num_places - 1)), num_B1.squeeze(1)
