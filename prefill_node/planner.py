"""Planning of prefill steps: all ranks run the token count of the fullest rank.

A proposal is the number of tokens that a rank has chosen for the next step, 0 if it has no work. A
plan's key is the maximum of the proposals. Ranks that need equal batch sizes pad to it.
"""

from collections.abc import Sequence


def max_num_tokens(num_tokens: Sequence[int]) -> int | None:
    return max(num_tokens) or None
