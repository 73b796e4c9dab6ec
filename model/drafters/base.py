"""The drafter seam: how any method proposes tokens for verification.

Shape legend: B rows, M tokens of a row that can be pending, N drafts this step, D hidden, P pages;
in prefill T packed tokens, G segments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model.batch import Batch
from model.cache import CacheGroup, Caches
from model.kernels.base import Kernels

UNKNOWN = -1
"""Stands for the token after a segment that is not known yet."""


@dataclass(frozen=True, slots=True)
class DraftState:
    """What the rounds before left behind, for B rows.

    ``tokens_BM[b, :m]`` are the m = ``num_pending_B[b]`` tokens emitted since the drafter was
    called last, and ``hidden_BMD[b, i]`` is the main model's true hidden state of the token before
    ``tokens_BM[b, i]``. ``num_known_B`` is L, prompt plus emitted tokens. Where ``first_B`` is True
    that of the first token was not shipped (zeros): its row of pass 1 leaves no trace in the cache.
    ``real_B`` is False for rows that only fill the batch up, None if there are none.
    ``pick(logits_BV, drafts_BN)`` chooses the draft after ``drafts_BN`` as its request samples, and
    tells the probabilities [B, V] it was drawn from if its request's acceptance needs them.
    """

    tokens_BM: Tensor
    hidden_BMD: Tensor
    num_pending_B: Tensor
    num_known_B: Tensor
    first_B: Tensor
    page_table_BP: Tensor
    pick: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    real_B: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens [B, N], each row a chain behind its known text. ``q_BNV`` are the probabilities that
    they were drawn from, None for deterministic drafts."""

    tokens_BN: Tensor
    q_BNV: Tensor | None = None


class Drafter(Protocol):
    """One drafting method. ``cache_groups`` are the caches it reads and writes besides the
    main model's; a prefill node fills them, and they travel with the rest. ``why_eager`` says why
    ``draft`` has to be called in Python each time, if so: it reads values on the host."""

    name: str
    why_eager: str
    max_drafts: int | None
    cache_groups: tuple[CacheGroup, ...]

    def adopt(self, kernels: Kernels) -> None:
        """Its weights are loaded: compute with these."""
        ...

    def prefill(self, batch: Batch, next_G: Tensor, hidden_1TD: Tensor, caches: Caches) -> None:
        """Fill the drafter's caches for the main model's packed ``batch``, whose hidden states are
        ``hidden_1TD``. ``next_G`` are the tokens behind each segment's last, or UNKNOWN."""
        ...

    def draft(self, state: DraftState, num_drafts: int, caches: Caches) -> Drafts:
        """Propose ``num_drafts`` tokens a row; with 0 the draft cache is kept warm."""
        ...
