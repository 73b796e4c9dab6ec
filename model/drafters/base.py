"""The drafter seam: how any method proposes tokens for verification.

Shape legend: B rows, N drafts this step, E places that a row may emit, F features, D hidden,
P pages of a row's table, V vocabulary; in prefill T packed tokens, G segments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes
from tandem.core.execution import CatchUpPolicy
from tandem.model.kernels.base import Kernels
from tandem.model.network.batch import Batch
from tandem.model.network.cache import CacheGroup, Caches
from tandem.model.network.tree import Tree
from tandem.model.sampling.ranking import TopCandidates

UNKNOWN_TOKEN = -1
"""Stands for the token after a segment that is not known yet."""
DrafterState = Any
"""Rows of a drafter: a dataclass of tensors whose first axis is the row, or None."""
DrafterTable = Any
"""What a drafter keeps of all rows besides, and changes in place; or None."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What any drafter may know of B rows. ``num_known_B`` is L, prompt plus emitted tokens, of
    which ``last_B1`` is the last. ``real_B`` is False for rows that only fill the batch up.
    ``rows_B`` are their places in the drafter's ``memory``. ``pick(logits_BV, drafts_BN)`` chooses
    the draft after ``drafts_BN`` as its request samples, and tells the probabilities [B, V] it was
    drawn from if its request's acceptance needs them; ``rank(logits_BQV, drafts_BM, nodes,
    num_candidates)`` what may follow nodes of a tree, whose bits are of the last known token and
    ``drafts_BM``.
    """

    last_B1: Tensor
    num_known_B: Tensor
    page_table_BP: Tensor
    real_B: Tensor
    rows_B: Tensor
    table: DrafterTable
    sample_draft: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    top_candidates: Callable[[Tensor, Tensor, Tree, int], TopCandidates]

    def draft_chain(self, num: int, logits: Callable[[int, Tensor], Tensor]) -> "Drafts":
        """Picks of the ``logits(i, last_B1)`` [B, V], each behind the one picked before."""
        drafts_BN, last_B1, drawn_from = self.last_B1[:, :0], self.last_B1, []
        for i in range(num):
            next_B, q_BV = self.sample_draft(logits(i, last_B1), drafts_BN)
            last_B1 = next_B.unsqueeze(1)
            drafts_BN = torch.cat((drafts_BN, last_B1), 1)
            drawn_from += [] if q_BV is None else [q_BV]
        return Drafts(drafts_BN, q_BNV=torch.stack(drawn_from, 1) if drawn_from else None)


class Drafts(NamedTuple):
    """Tokens [B, N], each row a chain behind its known text or the tree of its level; ``num_B`` is
    how many of a row's, the first ones, are drafts at all, None if all are. ``q_BNV`` are the
    probabilities that they were drawn from, siblings of a tree without those before and in the
    order of their numbers; None for deterministic drafts. ``parents_BN`` are the
    nodes that each comes after, where the level leaves it to the step."""

    tokens_BN: Tensor
    num_B: Tensor | None = None
    q_BNV: Tensor | None = None
    parents_BN: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step gave B rows: ``tokens_BE[b, : num_B[b]]``, and the features of the tokens before
    each of them."""

    tokens_BE: Tensor
    num_B: Tensor
    features_BEF: Tensor


class NoCatchUp:
    """How a drafter catches up that is called when there is something to draft, and keeps nothing
    of other steps."""

    initial_backlog = 0

    def catch_up_width(self, depth: int, behind: int) -> int:
        return 0

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        return 0

    def common_widths(self, depth: int) -> tuple[int, ...]:
        return (0,)


class Drafter(Protocol):
    """One drafting method. Nobody but it knows its rows, how far behind the text they are, and what
    is in its caches. One that keeps nothing has but a name and drafts of its own.

    Its part of a step is on the device and static, of the program of that step, and a failure in it
    is the step's; unless it ``runs_on_host``: then it is called before each program, as Python, and
    what it raises costs that rank the drafts of that step. ``uses_collectives``: it calls what all
    ranks of a gang have to call together. ``num_features``: of each token that the main model has
    seen it wants the last hidden state, or nothing (0), or what entered the layers ``taps`` if it
    names any; those of the last ``num_feature_tokens`` tokens of a prompt come with it.
    ``cache_groups`` are the caches it reads and writes besides the main model's; a prefill node
    fills them, and they travel with the rest. ``identity`` names the files that entries there are
    made by, if they are not the checkpoint's own.
    """

    name: str
    runs_on_host: bool = False
    uses_collectives: bool = False
    num_features: int = 0
    taps: tuple[int, ...] = ()
    num_feature_tokens: int = 1
    identity: str = ""
    cache_groups: tuple[CacheGroup, ...] = ()

    @property
    def status_note(self) -> str:
        """What a status should tell, if anything."""
        return ""

    @property
    def num_handover_features(self) -> int:
        """Features that come with a prompt."""
        return self.num_feature_tokens * self.num_features

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        """Its weights are loaded: compute with these."""
        return

    def check(self, page_size: int, max_model_len: int) -> None:
        """Raises ValueError if it cannot draft for texts so long on pages of so many tokens."""
        return

    def prefill(self, batch: Batch, next_GK: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        """Fill the drafter's caches for the main model's packed ``batch``, whose features are
        ``features_1TF``. ``next_GK`` are as many tokens behind each segment's last as entries may
        depend on, or UNKNOWN_TOKEN, and of what is not known nothing may be written: that of a
        prompt's last rows. Other segments have at least as many tokens behind them."""
        return

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        """How much it can draft, where ``max_depth`` is asked for at most."""
        return chain_shapes(max_depth)

    def catch_up(self, max_depth: int) -> CatchUpPolicy:
        """How it catches up where its drafts are at most so deep."""
        return NoCatchUp()

    def init_state(
        self, text: Sequence[int], features_F: Tensor, has_features: bool, max_depth: int
    ) -> DrafterState:
        """One row, of a sequence whose ``text`` ends with its first token. ``features_F`` are those
        of the last prompt tokens, ``num_handover_features``; zeros if they are not known: then
        nothing of the prompt's may be written."""
        return None

    def create_table(self, num_rows: int, num_tokens: int, device: torch.device) -> DrafterTable:
        """Of so many rows, whose texts have at most so many tokens. It must follow from their
        texts alone, so that rows can move and be begun anew."""
        return None

    def register_row(self, table: DrafterTable, row: int, token_ids: Sequence[int]) -> None:
        """A row begins whose text this is."""
        return

    def update_table(
        self, table: DrafterTable, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted
    ) -> None:
        """Rows have so many tokens, the last of them those that a step has given them."""
        return

    def draft(
        self,
        state: DrafterState,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        """Propose as much as ``level`` says, maybe nothing, and catch up with ``amount``. ``own``
        is left as it is."""

    def commit(self, state: DrafterState, emitted: Emitted, catch_up_width: int) -> DrafterState:
        """The rows after a step that caught up with ``amount``."""
        return None
