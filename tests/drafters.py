"""User-defined drafters for tests, loaded by ``speculation.drafter=tests.drafters:Again``."""

from typing import Any

import torch
from torch import Tensor

from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.none import NoDrafter
from tandem.model.network.cache import Caches


class FedMtp(MtpDrafter):
    """The MTP drafter, called on the host between programs."""

    runs_on_host = True


class Again(NoDrafter):
    """Drafts the last token again, up to the requested number of drafts."""

    name = "again"

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        return chain_shapes(max_depth)

    @classmethod
    def load(cls, *given: object) -> "Again":
        return cls()

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        return Drafts(context.last_B1.expand(-1, draft_shape.depth).contiguous())


class Failing(Again):
    """Raises in its seventh call with a real row."""

    name, runs_on_host = "failing", True

    def __init__(self) -> None:
        self.num_calls = 0

    def draft(self, state: None, context: DraftContext, **rest: Any) -> Drafts:
        self.num_calls += bool(context.real_B.any())
        if self.num_calls == 7:
            self.num_calls += 1
            raise RuntimeError("no idea")
        drafts = super().draft(state, context, **rest)
        return Drafts(drafts.tokens_BN, _half(drafts.tokens_BN))


def _half(tokens_BN: Tensor) -> Tensor:
    """Return the number of drafts for each row: all in even rows, one fewer in odd rows."""
    num_rows, num_drafts = tokens_BN.shape
    return num_drafts - torch.arange(num_rows) % 2
