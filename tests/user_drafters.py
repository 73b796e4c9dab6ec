"""User-defined drafters for tests: ``speculation.drafter=tests.user_drafters:Repeats``."""

import threading
from collections.abc import Sequence
from typing import Any


class Repeats:
    """Drafts the tokens that followed the last token where it stood before."""

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        *before, last = token_ids
        if last not in before:
            return []
        at = len(before) - 1 - before[::-1].index(last)
        return list(token_ids[at + 1 : at + 1 + num_drafts])


class Branches:
    """Drafts the continuations of the last token's two latest earlier places, as separate
    branches."""

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        places = [i for i, one in enumerate(token_ids[:-1]) if one == token_ids[-1]]
        for at in places[-2:]:
            rest = list(token_ids[at + 1 : at + 1 + num_drafts // 2])
            parents += [0, *range(len(tokens) + 1, len(tokens) + len(rest))][: len(rest)]
            tokens += rest
        return tokens, parents


class Hostile(Repeats):
    """Returns an invalid result in every third call, each time another one."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.lies: list[Any] = [
            *(None, 7, "text", [1.5], [[1]], [True], [-1], [10**9], ["a"], {1: 2}, ([1], [5])),
            *(([1], [-1]), ([1, 2], [0]), ([1, 2], [0, 0]), [1] * 99, ([1], None), (1, 2, 3)),
        ]

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> Any:
        self.num_calls += 1
        if self.num_calls % 3:
            return super().draft(token_ids, num_drafts)
        lie = self.lies[self.num_calls // 3 % len(self.lies)]
        if lie is None:
            raise SystemExit("enough")
        return lie


class Vandal(Repeats):
    """Empties the list that it is given."""

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        drafts = super().draft(token_ids, num_drafts)
        assert isinstance(token_ids, list)
        token_ids.clear()
        return drafts


class Hangs:
    """Blocks until it is released."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_calls = 0

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        self.num_calls += 1
        self.let_go.wait()
        return [token_ids[-1]]


class Broken:
    def draft(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        raise RuntimeError("no idea")


class Undrafting:
    """A class without a ``draft`` method."""


class WithArguments(Repeats):
    def __init__(self, something: object) -> None:
        self.something = something


def some_function(token_ids: Sequence[int], num_drafts: int) -> list[int]:
    return []
