"""Drafts of anybody's class: plain Python, token ids in, drafts out, whatever it does wrong.

Shape legend: B rows, N drafts.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.core.config import SpeculationConfig
from tandem.core.levels import Level, Levels, chains, grown
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.base import Drafts, View
from tandem.model.drafters.texts import ReadsTexts
from tandem.model.network.cache import Caches
from tandem.model.network.deepseek import DeepseekV3

log = logging.getLogger(__name__)
MOST_FAILURES = 3
"""Steps in a row with a failure, after which it is not called again."""
Found = tuple[list[int], list[int]]
"""Tokens, and the node that each comes after."""


class UserClass(Protocol):
    """What it has to be; made once by each rank, without arguments, and called on one thread."""

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> Any:
        """At most ``num_drafts`` tokens that may follow: a list of ids, one behind the other, or
        (ids, parents), where parent 0 is the end of the text and k the k-th draft."""


class UserDrafter(ReadsTexts):
    """Each of its rows' texts is given to ``theirs.draft``. A row for which that raises or gives
    what are no drafts goes without; so do all from whom the thread is not back within
    ``bound_s``. What ends later is dropped, and until then it is not called again."""

    is_fed = True

    def __init__(
        self, theirs: UserClass, num_nodes: int | None, vocab_size: int, bound_s: float
    ) -> None:
        self.name, self._theirs, self._num_nodes = type(theirs).__name__, theirs, num_nodes
        self._vocab_size, self._bound_s = vocab_size, bound_s
        self._texts: dict[int, list[int]] = {}
        self._thread: Thread | None = None
        self.num_failures = self._num_in_row = 0
        self._last_error = ""

    @classmethod
    def made_of(
        cls,
        theirs: Callable[[], UserClass],
        checkpoint: Checkpoint,
        network: DeepseekV3,
        asked: SpeculationConfig,
    ) -> "UserDrafter":
        """Raises ValueError if their class cannot be made."""
        try:
            made = theirs()
        except Exception as error:
            raise ValueError(
                f"speculation.drafter={asked.drafter!r} cannot be made without arguments: {error!r}"
            ) from error
        return cls(
            made, asked.max_tree_nodes, checkpoint.config.vocab_size, asked.drafter_timeout_s
        )

    def levels(self, most_depth: int) -> Levels:
        num_nodes = self._num_nodes
        return chains(most_depth) if num_nodes is None else grown(num_nodes, most_depth)

    @property
    def trouble(self) -> str:
        if not self.num_failures:
            return ""
        is_off = ", it is off" if self._num_in_row >= MOST_FAILURES else ""
        return f"{self.name} failed {self.num_failures} times{is_off}: {self._last_error}"

    def enter(self, memory: Tensor, row: int, token_ids: Sequence[int]) -> None:
        super().enter(memory, row, token_ids)
        self._texts[row] = list(token_ids)

    def draft(self, own: None, view: View, level: Level, amount: int, caches: Caches) -> Drafts:
        found = self._found(self._real_texts(view), level)
        tokens_BN = torch.zeros(len(view.real_B), level.num_nodes, dtype=torch.int64)
        parents_BN, num_B = tokens_BN.clone(), tokens_BN.new_zeros(len(tokens_BN))
        for b, (tokens, parents) in found.items():
            num_B[b] = num = len(tokens)
            tokens_BN[b, :num], parents_BN[b, :num] = torch.tensor([tokens, parents]).long()
        return Drafts(tokens_BN, num_B, parents_BN=None if level.is_chain else parents_BN)

    def _real_texts(self, view: View) -> dict[int, list[int]]:
        """By place in the batch."""
        known = zip(view.rows_B.tolist(), view.num_known_B.tolist(), strict=True)
        texts = {}
        for b, (row, num_known) in enumerate(known):
            if row in self._texts and bool(view.real_B[b]):
                text = self._texts[row]
                text += view.memory[row, len(text) : num_known].tolist()
                texts[b] = text
        return texts

    def _found(self, texts: dict[int, list[int]], level: Level) -> dict[int, Found]:
        if not texts or not level.num_nodes or self._num_in_row >= MOST_FAILURES:
            return {}
        found: list[Found] = []
        errors: list[BaseException] = []
        is_late = self._thread is not None and self._thread.is_alive()
        if not is_late:
            told = [[*one] for one in texts.values()], level, found, errors
            # Nobody waits for its end: a process can end while it hangs.
            self._thread = Thread(target=self._of_all, args=told, daemon=True)
            self._thread.start()
            self._thread.join(self._bound_s)
            is_late = self._thread.is_alive()
        if is_late:
            self._fail(TimeoutError(f"it has not come back within {self._bound_s} s"))
            return {}
        if errors:
            self._fail(errors[0], len(errors))
        else:
            self._num_in_row = 0
        return dict(zip(texts, found, strict=True))

    def _of_all(
        self, texts: list[list[int]], level: Level, found: list[Found], errors: list[BaseException]
    ) -> None:
        """On the thread; what it appends to is looked at once that has ended."""
        for text in texts:
            try:
                given = self._theirs.draft(text, level.num_nodes)
                found.append(checked(given, level, self._vocab_size))
            except BaseException as error:  # whatever it is: the thread is theirs
                errors.append(error)
                found.append(([], []))

    def _fail(self, error: BaseException, num: int = 1) -> None:
        self.num_failures, self._last_error = self.num_failures + num, repr(error)
        self._num_in_row += 1
        if self._num_in_row == MOST_FAILURES:
            log.error("%s", self.trouble)


def checked(given: Any, level: Level, vocab_size: int) -> Found:
    """Raises ValueError saying what is no draft."""
    if not isinstance(given, list | tuple):
        raise ValueError(f"drafts: {type(given)}; use a list of token ids, or (ids, parents)")
    tokens, parents = given if isinstance(given, tuple) else (given, range(len(given)))
    tokens, parents = list(tokens), list(parents)
    if not all(type(one) is int for one in (*tokens, *parents)):
        raise ValueError("drafts: they have to be ints")
    if len(tokens) > level.num_nodes or len(parents) != len(tokens):
        raise ValueError(
            f"drafts: {len(tokens)} tokens, {len(parents)} parents; use at most {level.num_nodes}"
        )
    if wrong := [one for one in tokens if not 0 <= one < vocab_size]:
        raise ValueError(f"drafts: {wrong[0]} is no token id; use 0 to {vocab_size - 1}")
    if wrong := [one for i, one in enumerate(parents) if not 0 <= one <= i]:
        raise ValueError(f"parents: {wrong[0]} is no earlier node")
    if level.is_chain and parents != list(range(len(parents))):
        raise ValueError("parents: a tree where chains are drafted; set speculation.max_tree_nodes")
    return tokens, parents
