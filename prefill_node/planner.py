"""What a prefill step shall be: as many rows of packed tokens on every rank as the fullest has.

A proposal is how many real tokens a rank has chosen for the next step, 0 if it has no work; a
plan's key is how many rows the forward has where all ranks need as many, padding included.
"""

from collections.abc import Sequence


def max_num_tokens(num_tokens: Sequence[int]) -> int | None:
    return max(num_tokens) or None
