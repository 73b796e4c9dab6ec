"""No drafts: plain decoding, and checkpoints without an MTP layer."""

from model.drafters.base import Drafter, Drafts, View
from model.network.cache import Caches


class NoDrafter(Drafter):
    name = "none"
    max_drafts = 0

    def draft(self, own: None, view: View, num_drafts: int, amount: int, caches: Caches) -> Drafts:
        assert num_drafts == 0, f"no drafter can give {num_drafts} drafts"
        return Drafts(view.last_B1[:, :0])
