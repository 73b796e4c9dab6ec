"""Two drafters' chains in one tree, equal prefixes once (SpecInfer, arXiv 2305.09781).

Shape legend: B rows, N drafts of each chain, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.forms import CatchUp
from tandem.core.levels import Level, Levels, chains
from tandem.model.drafters.base import Drafter, Drafts, Emitted, Notes, Own, View
from tandem.model.kernels.base import Kernels
from tandem.model.network.batch import Batch
from tandem.model.network.cache import Caches


class MergedDrafter(Drafter):
    """Of ``looked``, which remembers texts and draws nothing, and ``made``, which has rows, caches
    and features."""

    def __init__(self, looked: Drafter, made: Drafter) -> None:
        self._looked, self._made = looked, made
        self.name = f"{looked.name}+{made.name}"
        self.meets_ranks, self.num_features = made.meets_ranks, made.num_features
        self.taps, self.num_last = made.taps, made.num_last
        self.identity, self.cache_groups = made.identity, made.cache_groups

    def adopt(self, kernels: Kernels) -> None:
        self._looked.adopt(kernels)
        self._made.adopt(kernels)

    def prefill(self, batch: Batch, next_GK: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        self._made.prefill(batch, next_GK, features_1TF, caches)

    def levels(self, most_depth: int) -> Levels:
        """Both chains, as deep as one may be."""
        depths = [level.depth for level in self._made.levels(most_depth)[1:]]
        return chains(0) + tuple(Level(2 * depth, depth, None) for depth in depths)

    def catch_up(self, most_depth: int) -> CatchUp:
        return self._made.catch_up(most_depth)

    def begin(
        self, text: Sequence[int], features_F: Tensor, is_known: bool, most_depth: int
    ) -> Own:
        return self._made.begin(text, features_F, is_known, most_depth)

    def memory(self, num_rows: int, num_tokens: int, device: torch.device) -> Notes:
        return self._looked.memory(num_rows, num_tokens, device)

    def enter(self, memory: Notes, row: int, token_ids: Sequence[int]) -> None:
        self._looked.enter(memory, row, token_ids)

    def note(self, memory: Notes, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted) -> None:
        self._looked.note(memory, rows_B, num_known_B, emitted)

    def draft(self, own: Own, view: View, level: Level, amount: int, caches: Caches) -> Drafts:
        chain = chains(level.depth)[-1]
        made = self._made.draft(own, view, chain, amount, caches)
        if level.depth == 0:
            return made
        return merged(made, self._looked.draft(None, view, chain, 0, caches))

    def commit(self, own: Own, emitted: Emitted, amount: int) -> Own:
        return self._made.commit(own, emitted, amount)


def merged(made: Drafts, looked: Drafts) -> Drafts:
    """Of two chains of N drafts; those of odd numbers were ``made``. What the other has again, or
    has not, stands behind it a second time, where nobody comes to."""
    (made_BN, _, q_BNV, _), (looked_BN, num_B, *_) = made, looked
    place_N = torch.arange(made_BN.shape[1], device=made_BN.device)
    is_one_BN = (made_BN == looked_BN).long().cumprod(1) > 0
    if num_B is not None:
        is_one_BN = is_one_BN | (place_N >= num_B.unsqueeze(1))
    looked_BN = made_BN.where(is_one_BN, looked_BN)
    above_N = (2 * place_N - 1).clamp(min=0)
    was_one_BN = torch.cat((torch.ones_like(is_one_BN[:, :1]), is_one_BN[:, :-1]), 1)
    parents_BN = above_N.where(was_one_BN | is_one_BN, 2 * place_N)
    tokens = torch.stack((made_BN, looked_BN), 2).flatten(1)
    parents = torch.stack((above_N.expand_as(parents_BN), parents_BN), 2).flatten(1)
    drafts = Drafts(tokens, parents_BN=parents)
    if q_BNV is None:
        return drafts
    sure_BNV = torch.zeros_like(q_BNV).scatter(2, looked_BN.unsqueeze(2), 1.0)
    return drafts._replace(q_BNV=torch.stack((q_BNV, sure_BNV), 2).flatten(1, 2))
