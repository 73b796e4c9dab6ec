"""Two drafters' chains merged into one tree that holds their common prefix once (SpecInfer, arXiv
2305.09781).

Shape legend: B rows, N drafts of each chain, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes
from tandem.core.execution import CatchUpPolicy
from tandem.model.drafters.base import (
    DraftContext,
    Drafter,
    DrafterState,
    DrafterTable,
    Drafts,
    Emitted,
)
from tandem.model.kernels.base import Kernels
from tandem.model.network.batch import Batch
from tandem.model.network.cache import Caches


class MergedDrafter(Drafter):
    """A drafter that merges the chains of an n-gram drafter and of a model drafter.

    Only the n-gram drafter has a table. Only the model drafter has state per row, caches and
    features.
    """

    def __init__(self, ngram_drafter: Drafter, model_drafter: Drafter) -> None:
        self._ngram_drafter = ngram_drafter
        self._model_drafter = model_drafter
        self.name = f"{ngram_drafter.name}+{model_drafter.name}"
        self.uses_collectives = model_drafter.uses_collectives
        self.num_features = model_drafter.num_features
        self.taps = model_drafter.taps
        self.num_feature_tokens = model_drafter.num_feature_tokens
        self.identity = model_drafter.identity
        self.cache_groups = model_drafter.cache_groups

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        self._ngram_drafter.process_weights_after_loading(kernels)
        self._model_drafter.process_weights_after_loading(kernels)

    def prefill(self, batch: Batch, next_GK: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        self._model_drafter.prefill(
            batch=batch, next_GK=next_GK, features_1TF=features_1TF, caches=caches
        )

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        """Return trees that hold both chains, each at most ``max_depth`` deep."""
        depths = [
            draft_shape.depth for draft_shape in self._model_drafter.draft_shapes(max_depth)[1:]
        ]
        return chain_shapes(0) + tuple(DraftShape(2 * depth, depth, None) for depth in depths)

    def catch_up(self, max_depth: int) -> CatchUpPolicy:
        return self._model_drafter.catch_up(max_depth)

    def init_state(
        self, text: Sequence[int], features_F: Tensor, has_features: bool, max_depth: int
    ) -> DrafterState:
        return self._model_drafter.init_state(
            text=text, features_F=features_F, has_features=has_features, max_depth=max_depth
        )

    def create_table(self, num_rows: int, num_tokens: int, device: torch.device) -> DrafterTable:
        return self._ngram_drafter.create_table(num_rows, num_tokens, device)

    def register_row(self, table: DrafterTable, row: int, token_ids: Sequence[int]) -> None:
        self._ngram_drafter.register_row(table, row, token_ids)

    def update_table(
        self, table: DrafterTable, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted
    ) -> None:
        self._ngram_drafter.update_table(
            table=table, rows_B=rows_B, num_known_B=num_known_B, emitted=emitted
        )

    def draft(
        self,
        state: DrafterState,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        chain = chain_shapes(draft_shape.depth)[-1]
        model_drafts = self._model_drafter.draft(
            state=state,
            context=context,
            draft_shape=chain,
            catch_up_width=catch_up_width,
            caches=caches,
        )
        if draft_shape.depth == 0:
            return model_drafts
        return merge_chains(
            model_drafts,
            self._ngram_drafter.draft(
                state=None, context=context, draft_shape=chain, catch_up_width=0, caches=caches
            ),
        )

    def commit(self, state: DrafterState, emitted: Emitted, catch_up_width: int) -> DrafterState:
        return self._model_drafter.commit(state, emitted, catch_up_width)


def merge_chains(model_drafts: Drafts, ngram_drafts: Drafts) -> Drafts:
    """Merge two chains of N drafts into a tree of 2 N nodes.

    Odd nodes are the model's drafts, even nodes those of the n-grams. Where both chains agree, or
    the n-gram chain has ended, the even node is a copy of the model's draft and its sibling.
    Verification prefers the earlier sibling, so it never reaches the copy.
    """
    (model_BN, _, q_BNV, _), (ngram_BN, num_B, *_) = model_drafts, ngram_drafts
    place_N = torch.arange(model_BN.shape[1], device=model_BN.device)
    is_one_BN = (model_BN == ngram_BN).long().cumprod(1) > 0
    if num_B is not None:
        is_one_BN = is_one_BN | (place_N >= num_B.unsqueeze(1))
    ngram_BN = model_BN.where(is_one_BN, ngram_BN)
    above_N = (2 * place_N - 1).clamp(min=0)
    was_one_BN = torch.cat((torch.ones_like(is_one_BN[:, :1]), is_one_BN[:, :-1]), 1)
    parents_BN = above_N.where(was_one_BN | is_one_BN, 2 * place_N)
    tokens = torch.stack((model_BN, ngram_BN), 2).flatten(1)
    parents = torch.stack((above_N.expand_as(parents_BN), parents_BN), 2).flatten(1)
    drafts = Drafts(tokens, parents_BN=parents)
    if q_BNV is None:
        return drafts
    sure_BNV = torch.zeros_like(q_BNV).scatter(2, ngram_BN.unsqueeze(2), 1.0)
    return drafts._replace(q_BNV=torch.stack((q_BNV, sure_BNV), 2).flatten(1, 2))
