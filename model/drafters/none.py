"""No drafts: plain decoding, and checkpoints without an MTP layer."""

from tandem.core.levels import Level, Levels, chains
from tandem.model.drafters.base import Drafter, Drafts, View
from tandem.model.network.cache import Caches


class NoDrafter(Drafter):
    name = "none"

    def levels(self, most_depth: int) -> Levels:
        return chains(0)

    def draft(self, own: None, view: View, level: Level, amount: int, caches: Caches) -> Drafts:
        assert level.num_nodes == 0, f"no drafter can give {level.num_nodes} drafts"
        return Drafts(view.last_B1[:, :0])
