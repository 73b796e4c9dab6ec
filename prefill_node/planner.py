"""What a prefill step shall be: as many rows of packed tokens on every rank as the fullest has.

A proposal is how many real tokens a rank has chosen for the next step, 0 if it has no work; a
plan's key is how many rows the forward has, padding included.
"""

from collections.abc import Sequence

from runtime import lockstep


class LocalPlanner(lockstep.LocalPlanner[int, int]):
    """Of a gang of one rank, which pads nothing."""

    def decide(self, proposals: Sequence[int]) -> int | None:
        return max(proposals) or None
