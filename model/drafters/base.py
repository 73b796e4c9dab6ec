"""The drafter seam: how any method proposes tokens for verification.

Shape legend: B rows, N drafts this step, N1 = N + 1 places, F features, D hidden, P pages of a
row's table, V vocabulary; in prefill T packed tokens, G segments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from core.forms import CatchUp
from model.kernels.base import Kernels
from model.network.batch import Batch
from model.network.cache import CacheGroup, Caches

UNKNOWN = -1
"""Stands for the token after a segment that is not known yet."""
Own = Any
"""Rows of a drafter: a dataclass of tensors whose first axis is the row, or None."""


@dataclass(frozen=True, slots=True)
class View:
    """What any drafter may know of B rows. ``num_known_B`` is L, prompt plus emitted tokens, of
    which ``last_B1`` is the last. ``real_B`` is False for rows that only fill the batch up.
    ``pick(logits_BV, drafts_BN)`` chooses the draft after ``drafts_BN`` as its request samples, and
    tells the probabilities [B, V] it was drawn from if its request's acceptance needs them.
    """

    last_B1: Tensor
    num_known_B: Tensor
    page_table_BP: Tensor
    real_B: Tensor
    pick: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Drafts(NamedTuple):
    """Tokens [B, N], each row a chain behind its known text; ``num_B`` is how many of a row's are
    drafts at all, None if all are. ``q_BNV`` are the probabilities that they were drawn from, None
    for deterministic drafts."""

    tokens_BN: Tensor
    num_B: Tensor | None = None
    q_BNV: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step gave B rows: ``tokens_BN1[b, : num_B[b]]``, and the features of the tokens before
    each of them."""

    tokens_BN1: Tensor
    num_B: Tensor
    features_BN1F: Tensor


class NeverBehind:
    """How a drafter catches up that is called when there is something to draft, and keeps nothing
    of other steps."""

    start = 0

    def amount(self, num_drafts: int, behind: int) -> int:
        return 0

    def behind(self, before: int, num_drafts: int, amount: int) -> int:
        return 0

    def usual(self, num_drafts: int) -> tuple[int, ...]:
        return (0,)


class Drafter(Protocol):
    """One drafting method. Nobody but it knows its rows, how far behind the text they are, and what
    is in its caches. One that keeps nothing has but a name and drafts of its own.

    Its part of a step is on the device and static, of the program of that step, and a failure in it
    is the step's; unless it ``is_fed``: then it is called before each program, as Python, and
    what it raises costs that rank the drafts of that step. ``meets_ranks``: it calls what all ranks
    of a gang have to call together.
    ``num_features``: of each token that the main model has seen it wants the last hidden state, or
    nothing (0). ``cache_groups`` are the caches it reads and writes besides the main model's; a
    prefill node fills them, and they travel with the rest.
    """

    name: str
    is_fed: bool = False
    meets_ranks: bool = False
    max_drafts: int | None = None
    num_features: int = 0
    cache_groups: tuple[CacheGroup, ...] = ()

    def adopt(self, kernels: Kernels) -> None:
        """Its weights are loaded: compute with these."""
        return

    def prefill(self, batch: Batch, next_G: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        """Fill the drafter's caches for the main model's packed ``batch``, whose features are
        ``features_1TF``. ``next_G`` are the tokens behind each segment's last, or UNKNOWN."""
        return

    def catch_up(self, max_drafts: int) -> CatchUp:
        """How it catches up where a step drafts at most so much."""
        return NeverBehind()

    def begin(self, token: int, features_F: Tensor, is_known: bool, max_drafts: int) -> Own:
        """One row, of a sequence whose first token this is. ``features_F`` are those of the last
        prompt token, zeros if they are not known: then nothing of the prompt's may be written."""
        return None

    def draft(self, own: Own, view: View, num_drafts: int, amount: int, caches: Caches) -> Drafts:
        """Propose ``num_drafts`` tokens a row, maybe none, and catch up with ``amount``. ``own`` is
        left as it is."""

    def commit(self, own: Own, emitted: Emitted, amount: int) -> Own:
        """The rows after a step that caught up with ``amount``."""
        return None
