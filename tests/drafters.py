"""Drafters of tests, as anybody may write them: ``speculation.drafter=tests.drafters:Again``."""

from typing import Any

import torch
from torch import Tensor

from tandem.core.levels import Level, Levels, chains
from tandem.model.drafters.base import Drafts, View
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.none import NoDrafter
from tandem.model.network.cache import Caches


class FedMtp(MtpDrafter):
    """MTP, called between programs."""

    is_fed = True


class Again(NoDrafter):
    """The last token again, as often as is asked for."""

    name = "again"

    def levels(self, most_depth: int) -> Levels:
        return chains(most_depth)

    @classmethod
    def load(cls, *given: object) -> "Again":
        return cls()

    def draft(self, own: None, view: View, level: Level, amount: int, caches: Caches) -> Drafts:
        return Drafts(view.last_B1.expand(-1, level.depth).contiguous())


class Failing(Again):
    """Python, which raises in its seventh call with a real row."""

    name, is_fed = "failing", True

    def __init__(self) -> None:
        self.num_calls = 0

    def draft(self, own: None, view: View, *rest: Any) -> Drafts:
        self.num_calls += bool(view.real_B.any())
        if self.num_calls == 7:
            self.num_calls += 1
            raise RuntimeError("no idea")
        drafts = super().draft(own, view, *rest)
        return Drafts(drafts.tokens_BN, _half(drafts.tokens_BN))


def _half(tokens_BN: Tensor) -> Tensor:
    """Rows in turns have all drafts, or one less."""
    num_rows, num_drafts = tokens_BN.shape
    return num_drafts - torch.arange(num_rows) % 2
