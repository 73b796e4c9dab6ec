"""The drafter seam: how any method proposes tokens for verification.

Shape legend: B rows, M tokens that the last step can have emitted at most, N drafts this step,
D hidden, P pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model.batch import PromptRows
from model.cache import CacheGroup, Caches


@dataclass(frozen=True, slots=True)
class DraftState:
    """What the last round left behind, for B rows.

    ``tokens_BM[b, :m]`` are the m = ``num_emitted_B[b]`` tokens emitted last, and
    ``hidden_BMD[b, i]`` is the main model's true hidden state of the token before
    ``tokens_BM[b, i]``. ``num_known_B`` is L, prompt plus emitted tokens. Where ``first_B``
    is True the hidden state was not shipped (zeros): pass 1 of that row leaves no trace in
    the cache. ``max_pages_B`` is Batch's. ``pick(logits_BV, drafts_BN)`` chooses the draft
    after ``drafts_BN`` as its request samples, and tells the probabilities [B, V] it was drawn
    from if its request's acceptance needs them.
    """

    tokens_BM: Tensor
    hidden_BMD: Tensor
    num_emitted_B: Tensor
    num_known_B: Tensor
    first_B: Tensor
    page_table_BP: Tensor
    max_pages_B: tuple[int, ...]
    pick: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens [B, N]; ``parents[i]`` is the draft that draft i follows, -1 the known text.

    ``q_BNV`` are the probabilities they were drawn from, None for deterministic drafts.
    """

    tokens_BN: Tensor
    parents: tuple[int, ...]
    q_BNV: Tensor | None = None


def chain(num_drafts: int) -> tuple[int, ...]:
    """A chain is a tree: -1, 0, 1, ..."""
    return tuple(range(-1, num_drafts - 1))


class Drafter(Protocol):
    """One drafting method. ``cache_groups`` are the caches it reads and writes besides the
    main model's; a prefill node fills them, and they travel with the rest."""

    name: str
    max_drafts: int | None
    cache_groups: tuple[CacheGroup, ...]

    def prefill(
        self, next_ids_BQ: Tensor, hidden_BQD: Tensor, rows: PromptRows, caches: Caches
    ) -> None:
        """Fill the draft slots of ``rows``: slot i pairs the hidden state of token i with the
        token after it."""
        ...

    def draft(self, state: DraftState, num_drafts: int, caches: Caches) -> Drafts:
        """Propose ``num_drafts`` tokens a row; with 0 the draft cache is kept warm."""
        ...
