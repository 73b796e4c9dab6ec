"""User-defined drafters: plain Python classes that map token ids to drafts. Errors in them only
cost drafts.

Shape legend: B rows, N drafts.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes, dynamic_tree_shapes
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.drafters.text_drafter import TextDrafter
from tandem.model.network.cache import Caches
from tandem.model.network.deepseek import DeepseekV3

log = logging.getLogger(__name__)
MAX_FAILURES_IN_ROW = 3
"""Number of consecutive steps with a failure after which the class is not called again."""
TokensAndParents = tuple[list[int], list[int]]
"""Tokens, and the parent node of each."""


class UserClass(Protocol):
    """The interface of a user-defined class. Each rank creates one instance, without arguments, and
    calls it on one thread at a time."""

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> Any:
        """Return at most ``num_drafts`` tokens that may follow ``token_ids``.

        The result is a list of ids, which form a chain, or a pair (ids, parents). Parent 0 is the
        end of the text, parent k is the k-th draft.
        """


class UserDrafter(TextDrafter):
    """A drafter that calls ``user_drafter.draft`` with the text of each row.

    A row has no drafts if the call raises an exception or returns invalid drafts. The calls run on
    a thread. If the thread does not end within ``timeout_s``, no row has drafts and its results are
    dropped. The class is not called again before the thread has ended.
    """

    runs_on_host = True

    def __init__(
        self, user_drafter: UserClass, num_nodes: int | None, vocab_size: int, timeout_s: float
    ) -> None:
        self.name = type(user_drafter).__name__
        self._user_drafter = user_drafter
        self._num_nodes = num_nodes
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._texts: dict[int, list[int]] = {}
        self._thread: Thread | None = None
        self.num_failures = self._num_failures_in_row = 0
        self._last_error = ""

    @classmethod
    def create(
        cls,
        user_class: Callable[[], UserClass],
        checkpoint: Checkpoint,
        network: DeepseekV3,
        spec_config: SpeculationConfig,
    ) -> "UserDrafter":
        """Create an instance of ``user_class`` and wrap it. Raises ValueError if the constructor
        fails."""
        try:
            user_drafter = user_class()
        except Exception as error:
            raise ValueError(
                f"speculation.drafter={spec_config.drafter!r}: the class cannot be created without "
                f"arguments: {error!r}"
            ) from error
        return cls(
            user_drafter,
            spec_config.max_tree_nodes,
            checkpoint.config.vocab_size,
            spec_config.drafter_timeout_s,
        )

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        num_nodes = self._num_nodes
        return (
            chain_shapes(max_depth)
            if num_nodes is None
            else dynamic_tree_shapes(num_nodes, max_depth)
        )

    @property
    def status_note(self) -> str:
        if not self.num_failures:
            return ""
        is_off = " and is switched off" if self._num_failures_in_row >= MAX_FAILURES_IN_ROW else ""
        return f"{self.name} failed {self.num_failures} times{is_off}: {self._last_error}"

    def register_row(self, table: Tensor, row: int, token_ids: Sequence[int]) -> None:
        super().register_row(table, row, token_ids)
        self._texts[row] = list(token_ids)

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        found = self._draft_with_timeout(self._real_texts(context), draft_shape)
        tokens_BN = torch.zeros(len(context.real_B), draft_shape.num_nodes, dtype=torch.int64)
        parents_BN = tokens_BN.clone()
        num_B = tokens_BN.new_zeros(len(tokens_BN))
        for b, (tokens, parents) in found.items():
            num_B[b] = num = len(tokens)
            tokens_BN[b, :num], parents_BN[b, :num] = torch.tensor([tokens, parents]).long()
        return Drafts(tokens_BN, num_B, parents_BN=None if draft_shape.is_chain else parents_BN)

    def _real_texts(self, context: DraftContext) -> dict[int, list[int]]:
        """Return the text of each row that is not padding, by row of the batch."""
        known = zip(context.rows_B.tolist(), context.num_known_B.tolist(), strict=True)
        texts = {}
        for b, (row, num_known) in enumerate(known):
            if row in self._texts and bool(context.real_B[b]):
                text = self._texts[row]
                text += context.table[row, len(text) : num_known].tolist()
                texts[b] = text
        return texts

    def _draft_with_timeout(
        self, texts: dict[int, list[int]], draft_shape: DraftShape
    ) -> dict[int, TokensAndParents]:
        """Call the class on a thread and return its drafts by row of the batch. Return {} if the
        thread does not end in time, or if the class has failed too often."""
        if (
            not texts
            or not draft_shape.num_nodes
            or self._num_failures_in_row >= MAX_FAILURES_IN_ROW
        ):
            return {}
        found: list[TokensAndParents] = []
        errors: list[BaseException] = []
        is_late = self._thread is not None and self._thread.is_alive()
        if not is_late:
            ids = [[*ids] for ids in texts.values()], draft_shape, found, errors
            # A daemon thread, so that the process can exit while the user's code hangs.
            self._thread = Thread(target=self._draft_all, args=ids, daemon=True)
            self._thread.start()
            self._thread.join(self._timeout_s)
            is_late = self._thread.is_alive()
        if is_late:
            self._record_failure(
                TimeoutError(f"draft() has not returned within {self._timeout_s} s")
            )
            return {}
        if errors:
            self._record_failure(errors[0], len(errors))
        else:
            self._num_failures_in_row = 0
        return dict(zip(texts, found, strict=True))

    def _draft_all(
        self,
        texts: list[list[int]],
        draft_shape: DraftShape,
        found: list[TokensAndParents],
        errors: list[BaseException],
    ) -> None:
        """Call the class for each text, on the thread. The caller reads ``found`` and ``errors``
        only after the thread has ended."""
        for text in texts:
            try:
                drafts = self._user_drafter.draft(text, draft_shape.num_nodes)
                found.append(check_drafts(drafts, draft_shape, self._vocab_size))
            except BaseException as error:  # SystemExit, too, must only cost drafts
                errors.append(error)
                found.append(([], []))

    def _record_failure(self, error: BaseException, num: int = 1) -> None:
        self.num_failures = self.num_failures + num
        self._last_error = repr(error)
        self._num_failures_in_row += 1
        if self._num_failures_in_row == MAX_FAILURES_IN_ROW:
            log.error("%s", self.status_note)


def check_drafts(drafts: Any, draft_shape: DraftShape, vocab_size: int) -> TokensAndParents:
    """Return the drafts as (tokens, parents). Raises ValueError if they are not valid for
    ``draft_shape``."""
    if not isinstance(drafts, list | tuple):
        raise ValueError(f"drafts: got {type(drafts)}; use a list of token ids, or (ids, parents)")
    tokens, parents = drafts if isinstance(drafts, tuple) else (drafts, range(len(drafts)))
    tokens = list(tokens)
    parents = list(parents)
    if not all(type(number) is int for number in (*tokens, *parents)):
        raise ValueError("drafts: token ids and parents must be ints")
    if len(tokens) > draft_shape.num_nodes or len(parents) != len(tokens):
        raise ValueError(
            f"drafts: {len(tokens)} tokens, {len(parents)} parents; use at most "
            f"{draft_shape.num_nodes} tokens, each with one parent"
        )
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"drafts: {wrong[0]} is not a token id; use 0 to {vocab_size - 1}")
    if wrong := [parent for i, parent in enumerate(parents) if not 0 <= parent <= i]:
        raise ValueError(f"parents: {wrong[0]} is not the number of an earlier node")
    if draft_shape.is_chain and parents != list(range(len(parents))):
        raise ValueError(
            "parents: form a tree, but chains are drafted; set speculation.max_tree_nodes"
        )
    return tokens, parents
