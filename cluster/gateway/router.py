"""Which prefill rank and which decode rank serve a request: a pure choice over loads."""

from collections.abc import Sequence

from cluster.gateway.handles import Handle
from core.errors import NodeLost

MAX_PREFERRED_LEAD = 4096
"""Prompt tokens; beyond it waiting costs more than computing a known beginning again."""
Ranks = tuple[Handle, Handle]
"""Where a prompt is computed, and where its answer is written."""


def choose_route(pairs: Sequence[Ranks], preferred: str | None = None) -> Ranks:
    """The least loaded pair; among equals that of the prefill rank that got least.

    The ``preferred`` prefill rank, which knows the prompt's beginning, counts as idle while it
    has at most MAX_PREFERRED_LEAD tokens more to compute than the least loaded one.

    Raises NodeLost when there is no pair.
    """
    if not pairs:
        raise NodeLost("no prefill and decode rank are left that work together and cache alike")
    least = min(p.num_tokens for p, _ in pairs)

    def cost(pair: Ranks) -> tuple[int, int, int, int, str]:
        p, d = pair
        is_preferred = p.name == preferred and p.num_tokens - least <= MAX_PREFERRED_LEAD
        return d.num_rows, 0 if is_preferred else 1, p.num_tokens, p.num_sent, d.name

    return min(pairs, key=cost)
