"""The thinking part of an answer: which tokens begin and end it, and whether a place is inside.

The last of the two tokens before a place decides, in the prompt or in the answer.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from tandem.text.tokenizer import read_tokenizer

ThinkIds = tuple[int, int]
"""The tokens that begin and end the thinking part."""


def read_think_ids(path: Path, names: tuple[str, str]) -> ThinkIds | None:
    """Token ids of ``names`` in the checkpoint's tokenizer.json; None if that is not there or
    one of them is not a single token of it.

    Raises ValueError naming the file when it cannot be read.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        return None
    begin, end = (tokenizer.token_to_id(name) for name in names)
    return None if begin is None or end is None else (begin, end)


def is_thinking_at_start(
    prompt_ids: Sequence[int], output_ids: Sequence[int], think_ids: ThinkIds | None
) -> bool:
    """Whether the token after ``output_ids`` is inside the thinking part."""
    if think_ids is None:
        return False
    backwards = chain(reversed(output_ids), reversed(prompt_ids))
    return next((token == think_ids[0] for token in backwards if token in think_ids), False)
