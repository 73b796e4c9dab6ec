"""The thinking part of an answer: its start and end tokens, and whether a position is inside.

A position is inside if the last start or end token before it, in prompt or answer, is a start
token.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from tandem.text.tokenizer import read_tokenizer

ThinkIds = tuple[int, int]
"""Ids of the tokens that start and end the thinking part."""


def read_think_ids(path: Path, names: tuple[str, str]) -> ThinkIds | None:
    """Return the ids of the tokens ``names`` in the tokenizer.json of the folder ``path``.

    Returns None without that file, or if one of the names is not a single token. Raises
    ValueError, which names the file, if it cannot be read.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        return None
    begin_id, end = (tokenizer.token_to_id(name) for name in names)
    return None if begin_id is None or end is None else (begin_id, end)


def is_thinking_at_start(
    prompt_ids: Sequence[int], output_ids: Sequence[int], think_ids: ThinkIds | None
) -> bool:
    """Return whether the token after ``output_ids`` is inside the thinking part.

    Returns False if ``think_ids`` is None.
    """
    if think_ids is None:
        return False
    backwards = chain(reversed(output_ids), reversed(prompt_ids))
    return next((token == think_ids[0] for token in backwards if token in think_ids), False)
