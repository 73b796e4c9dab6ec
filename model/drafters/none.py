"""No drafts: plain decoding, and checkpoints without an MTP layer."""

from torch import Tensor

from model.batch import Batch
from model.cache import CacheGroup, Caches
from model.drafters.base import Drafts, DraftState
from model.kernels.base import Kernels


class NoDrafter:
    name = "none"
    why_eager = ""
    max_drafts: int | None = 0
    cache_groups: tuple[CacheGroup, ...] = ()

    def adopt(self, kernels: Kernels) -> None:
        return

    def prefill(self, batch: Batch, next_G: Tensor, hidden_1TD: Tensor, caches: Caches) -> None:
        return

    def draft(self, state: DraftState, num_drafts: int, caches: Caches) -> Drafts:
        assert num_drafts == 0, f"no drafter can give {num_drafts} drafts"
        return Drafts(state.tokens_BM[:, :0])
