"""The interface of drafters: how a drafting method proposes tokens for verification.

Shape legend: B rows, N drafts this step, M drafts so far, Q tree nodes, E tokens that a row may
emit. F features, D hidden, P pages of a row's table, V vocabulary. In prefill: T packed tokens, G
segments, K tokens after a segment.
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
"""Placeholder for a token that follows a segment but is not known yet."""
DrafterState = Any
"""State that a drafter keeps per row: a dataclass of tensors whose first axis is the row, or
None."""
DrafterTable = Any
"""State that a drafter shares between rows and updates in place, or None."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Everything a drafter may read about the B rows of a step.

    Attributes:
        last_B1: Last known token of each row.
        num_known_B: Number of known tokens per row: prompt plus emitted tokens.
        page_table_BP: Pages of each row, for the drafter's own caches.
        real_B: False for padding rows.
        rows_B: Index of each row in ``table``.
        table: The drafter's cross-row table (``Drafter.create_table``), or None.
        sample_draft: ``(logits_BV, drafts_BN) -> (tokens_B, q_BV | None)``. Samples the draft that
            follows ``drafts_BN`` with each request's sampling settings. Also returns the
            distribution q that it sampled from, if an acceptance rule of the batch needs q.
        top_candidates: ``(logits_BQV, drafts_BM, nodes, num_candidates) -> TopCandidates``. Ranks
            the tokens that may follow each of Q tree nodes. In the nodes' ancestor masks, bit 0 is
            the last known token and bits 1..M are ``drafts_BM``.
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
        """Sample a chain of ``num`` drafts.

        ``logits(i, last_B1)`` returns the logits [B, V] for draft i, given the token before it.
        """
        drafts_BN = self.last_B1[:, :0]
        last_B1 = self.last_B1
        drawn_from = []
        for i in range(num):
            next_B, q_BV = self.sample_draft(logits(i, last_B1), drafts_BN)
            last_B1 = next_B.unsqueeze(1)
            drafts_BN = torch.cat((drafts_BN, last_B1), 1)
            drawn_from += [] if q_BV is None else [q_BV]
        return Drafts(drafts_BN, q_BNV=torch.stack(drawn_from, 1) if drawn_from else None)


class Drafts(NamedTuple):
    """Tokens proposed for verification in one step.

    Attributes:
        tokens_BN: Draft tokens: a chain, or the nodes of a tree with parents before children.
        num_B: Number of valid drafts per row; they come first. None if all N are valid.
        q_BNV: Distribution that each draft was sampled from. In a tree, siblings are sampled
            without replacement in node order. None for drafts chosen deterministically.
        parents_BN: Parent node of each draft if the tree is built per step, None if the
            ``DraftShape`` fixes the parents.
    """

    tokens_BN: Tensor
    num_B: Tensor | None = None
    q_BNV: Tensor | None = None
    parents_BN: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens that one step emitted for B rows.

    Attributes:
        tokens_BE: Emitted tokens; the first ``num_B[b]`` of row b are valid.
        num_B: Number of emitted tokens per row.
        features_BEF: Features of the token before each emitted token.
    """

    tokens_BE: Tensor
    num_B: Tensor
    features_BEF: Tensor


class NoCatchUp:
    """Catch-up policy of a drafter that keeps no state between steps. Such a drafter never has a
    backlog, so steps without drafts can leave it out."""

    initial_backlog = 0

    def catch_up_width(self, depth: int, backlog: int) -> int:
        return 0

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        return 0

    def common_widths(self, depth: int) -> tuple[int, ...]:
        return (0,)


class Drafter(Protocol):
    """A drafting method, such as MTP, EAGLE or n-gram lookup.

    The engine knows nothing about a drafter's state, backlog or caches. A stateless drafter
    implements ``name`` and ``draft`` only.

    ``draft`` is normally part of the step's compiled program: it must run on the device with static
    shapes, and an exception fails the step. With ``runs_on_host`` it is called from Python before
    the program instead, and an exception only costs this rank the drafts of that step.

    Attributes:
        name: Name of the method, for messages and the status.
        runs_on_host: ``draft`` is Python code that runs before each step's program.
        uses_collectives: ``draft`` issues collectives, so all ranks that step together must call it
            together.
        num_features: Number of feature values that the drafter needs per token; 0 if none. Features
            are the main model's last hidden state, or the inputs of the layers in ``taps``.
        taps: Layers of the main model whose inputs are the features; (): the last hidden state.
        num_feature_tokens: Number of trailing prompt tokens whose features are handed over to the
            decode rank.
        identity: Digest of weight files outside the checkpoint that determine the entries of
            ``cache_groups``. "" if there are none.
        cache_groups: Caches besides the main model's. Prefill nodes fill them; they are transferred
            together with the KV cache.
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
        """Text to add to the rank's status, "" for none."""
        return ""

    @property
    def num_handover_features(self) -> int:
        """Number of features handed over with a prompt."""
        return self.num_feature_tokens * self.num_features

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        """Prepare the loaded weights for ``kernels``, which compute the drafter from then on."""
        return

    def check(self, page_size: int, max_model_len: int) -> None:
        """Raise ValueError if the drafter does not support ``page_size`` or ``max_model_len``."""
        return

    def prefill(self, batch: Batch, next_GK: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        """Fill the drafter's caches for one packed prefill batch of the main model.

        Entries that depend on an UNKNOWN_TOKEN must not be written. UNKNOWN_TOKEN occurs only at
        the end of a prompt; every other segment has K known tokens after it.

        Args:
            batch: The main model's batch: G segments, T tokens in all.
            next_GK: The K tokens that follow each segment, where K is the largest lag of
                ``cache_groups``. UNKNOWN_TOKEN marks tokens that do not exist yet.
            features_1TF: Features of the T tokens.
            caches: Caches of all groups.
        """
        return

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        """Return the draft shapes that a step may use, none deeper than ``max_depth``."""
        return chain_shapes(max_depth)

    def catch_up(self, max_depth: int) -> CatchUpPolicy:
        """Return the catch-up policy for drafts that are at most ``max_depth`` deep."""
        return NoCatchUp()

    def init_state(
        self, text: Sequence[int], features_F: Tensor, has_features: bool, max_depth: int
    ) -> DrafterState:
        """Create the state of one row.

        Args:
            text: Prompt and output tokens, ending with the token that the prefill rank sampled.
            features_F: Features of the last ``num_feature_tokens`` prompt tokens.
            has_features: False if the hand-over carried no features (``features_F`` is zero). The
                drafter must then write no cache entry for a prompt token.
            max_depth: Maximum draft depth.
        """
        return None

    def create_table(self, num_rows: int, num_tokens: int, device: torch.device) -> DrafterTable:
        """Allocate the table for ``num_rows`` rows of at most ``num_tokens`` tokens.

        The table's contents must depend only on the texts of its rows, so that sequences can
        migrate and restart.
        """
        return None

    def register_row(self, table: DrafterTable, row: int, token_ids: Sequence[int]) -> None:
        """Store the text of a sequence that starts in ``row``."""
        return

    def update_table(
        self, table: DrafterTable, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted
    ) -> None:
        """Add the tokens that a step emitted to the table. ``num_known_B`` already includes
        them."""
        return

    def draft(
        self,
        state: DrafterState,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        """Propose drafts of ``draft_shape``, or none if the shape has no nodes. Also process
        backlog, up to ``catch_up_width`` (core/execution.py).

        Must not modify ``state``.
        """

    def commit(self, state: DrafterState, emitted: Emitted, catch_up_width: int) -> DrafterState:
        """Return the state of the rows after a step that caught up by ``catch_up_width``."""
        return None
