"""Planning of prefill steps: the ranks agree on the largest token count of any rank.

A proposal is the number of tokens that a rank has chosen for the next step, 0 if it has no work.
The key of the plan is the maximum of the proposals. Ranks that need equal batch sizes pad their
batches to this number.
"""

from collections.abc import Sequence


def max_num_tokens(num_tokens: Sequence[int]) -> int | None:
    return max(num_tokens) or None
