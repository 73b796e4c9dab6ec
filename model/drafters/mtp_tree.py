"""Draft trees from the MTP layer applied to its own output: the best nodes of a beam search, as in
EAGLE-2 (arXiv 2406.16858).

Shape legend: B rows, K nodes of a beam, M = K * (passes after the first), D hidden.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import MAX_NODES, DraftShape, DraftShapes, dynamic_tree_shapes
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.drafters.beams import (
    Beam,
    Candidates,
    expand_beam,
    next_beam,
    root_beam,
    select_tree,
)
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.mtp_rows import MtpRows
from tandem.model.kernels.base import RopeCosSin
from tandem.model.network.batch import Batch, physical_slots
from tandem.model.network.cache import Caches
from tandem.model.network.deepseek import DeepseekV3


class MtpTreeDrafter(MtpDrafter):
    """An MTP drafter of trees.

    Pass 1 is the same as for chains. Each later pass has ``top_k`` rows per sequence. Each row has
    its own slot after those of the known tokens, and sees the known tokens and its own path in the
    tree.
    """

    _num_nodes: int
    _top_k: int

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> Self:
        """Load the drafter as for chains. Also raises ValueError if the beam search cannot yield
        trees of ``speculation.max_tree_nodes``."""
        drafter = super().load(checkpoint, network, spec_config)
        assert spec_config.max_tree_nodes is not None, (
            "tree drafting needs speculation.max_tree_nodes"
        )
        top_k = spec_config.top_k
        num_later = spec_config.max_depth - 1
        most = top_k + num_later * top_k**2
        if spec_config.max_tree_nodes > most:
            raise ValueError(
                f"speculation.max_tree_nodes={spec_config.max_tree_nodes}: trees have at most "
                f"{most} nodes with speculation.top_k={top_k} and speculation.max_depth="
                f"{spec_config.max_depth}; lower max_tree_nodes or raise one of these"
            )
        if top_k * num_later > MAX_NODES:
            raise ValueError(
                f"speculation.top_k={top_k}: use at most {MAX_NODES // num_later} with "
                f"speculation.max_depth={spec_config.max_depth}"
            )
        drafter._num_nodes = spec_config.max_tree_nodes
        drafter._top_k = top_k
        return drafter

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        return dynamic_tree_shapes(self._num_nodes, max_depth, self._top_k)

    def draft(
        self,
        state: MtpRows,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        head_BD = self._first_pass(
            state=state,
            context=context,
            draft_shape=draft_shape,
            catch_up_width=catch_up_width,
            caches=caches,
        )
        if head_BD is None:
            return Drafts(state.tokens_BM[:, :0])
        beam = root_beam(head_BD)
        candidates: list[Candidates] = []
        for batch, angles in self._beam_passes(context, draft_shape, caches):
            candidates.append(self._expand(beam, context))
            beam = next_beam(beam, candidates)
            batch = replace(
                batch,
                token_ids_BQ=beam.drafts_BM[:, -self._top_k :],
                # Bit 0 is the last known token, which is not among these slots.
                bits_BQ=beam.nodes.bits_BQ >> 1,
            )
            hidden_XD = self.forward(
                batch=batch, hidden_XD=beam.hidden_BKD.flatten(0, 1), caches=caches, angles=angles
            )
            beam = beam._replace(hidden_BKD=hidden_XD.view_as(beam.hidden_BKD))
        return select_tree([*candidates, self._expand(beam, context)], draft_shape.num_nodes)

    def _expand(self, beam: Beam, context: DraftContext) -> Candidates:
        logits_BKV = self._logits(beam.hidden_BKD)
        return expand_beam(
            beam,
            context.top_candidates(logits_BKV, beam.drafts_BM, beam.nodes, self._top_k),
        )

    def _beam_passes(
        self, context: DraftContext, draft_shape: DraftShape, caches: Caches
    ) -> Iterator[tuple[Batch, RopeCosSin]]:
        """Yield the batch and RoPE angles of each pass after the first. The caller sets tokens and
        paths."""
        num_passes = draft_shape.depth - 1
        known_B1 = context.num_known_B.unsqueeze(1)
        if num_passes == 0:
            return
        index_M = torch.arange(num_passes * self._top_k, device=known_B1.device)
        positions_BM = known_B1 + index_M // self._top_k
        page_size = caches[self.group][0].shape[1]
        first_B1 = known_B1 - self.lag
        places_BM = physical_slots(
            page_table_BP=context.page_table_BP,
            slots_BQ=first_B1 + index_M,
            keep_BQ=None,
            page_size=page_size,
        )
        context_BK = first_B1.expand(-1, self._top_k)
        real_BK = context.real_B.unsqueeze(1).expand_as(context_BK)
        passes = positions_BM.chunk(num_passes, 1), places_BM.chunk(num_passes, 1)
        for at, places in zip(*passes, strict=True):
            angles = self._rope.at(at.flatten())
            own = at, at, places.contiguous(), context_BK, context.page_table_BP
            yield Batch(*own, real_BQ=real_BK), angles
