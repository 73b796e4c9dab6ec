"""The drafter that drafts nothing, for plain decoding and for checkpoints without an MTP layer."""

from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes
from tandem.model.drafters.base import DraftContext, Drafter, Drafts
from tandem.model.network.cache import Caches


class NoDrafter(Drafter):
    """A drafter without drafts."""

    name = "none"

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        return chain_shapes(0)

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        assert draft_shape.num_nodes == 0, (
            f"the drafter 'none' cannot make {draft_shape.num_nodes} drafts"
        )
        return Drafts(context.last_B1[:, :0])
