"""No drafts: plain decoding, and checkpoints without an MTP layer. What a drafter that keeps
nothing inherits."""

from torch import Tensor

from model.drafters.base import Drafts, Emitted, View
from model.kernels.base import Kernels
from model.network.batch import Batch
from model.network.cache import CacheGroup, Caches


class NeverBehind:
    """It is called when there is something to draft."""

    start = 0

    def amount(self, num_drafts: int, behind: int) -> int:
        return 0

    def behind(self, before: int, num_drafts: int, amount: int) -> int:
        return 0

    def usual(self, num_drafts: int) -> tuple[int, ...]:
        return (0,)


class NoDrafter:
    name = "none"
    is_fed = False
    meets_ranks = False
    max_drafts: int | None = 0
    num_features = 0
    cache_groups: tuple[CacheGroup, ...] = ()

    def adopt(self, kernels: Kernels) -> None:
        return

    def prefill(self, batch: Batch, next_G: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        return

    def catch_up(self, max_drafts: int) -> NeverBehind:
        return NeverBehind()

    def begin(self, token: int, features_F: Tensor, is_known: bool, max_drafts: int) -> None:
        return

    def draft(self, own: None, view: View, num_drafts: int, amount: int, caches: Caches) -> Drafts:
        assert num_drafts == 0, f"no drafter can give {num_drafts} drafts"
        return Drafts(view.last_B1[:, :0])

    def commit(self, own: None, emitted: Emitted, amount: int) -> None:
        return
