"""Which prefill rank and which decode rank serve a request: pure choices over loads."""

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import NodeLost

MAX_PREFERRED_LEAD = 4096
"""Prompt tokens; beyond it waiting costs more than computing a known beginning again."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """``num_tokens`` are prompt tokens sent there and not yet answered, ``num_sent`` requests
    ever sent there."""

    name: str
    num_tokens: int
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """``num_rows`` sequences run or wait there, of all gateways as far as is known here."""

    name: str
    num_rows: int


Pairs = Sequence[tuple[PrefillLoad, DecodeLoad]]


def choose_route(pairs: Pairs, preferred: str | None = None) -> tuple[str, str]:
    """Prefill and decode rank of the least loaded pair; among equals the prefill rank that got
    least.

    The ``preferred`` prefill rank, which knows the prompt's beginning, counts as idle while it
    has at most MAX_PREFERRED_LEAD tokens more to compute than the least loaded one.

    Raises NodeLost when there is no pair.
    """
    if not pairs:
        raise NodeLost("no prefill and decode rank are left that work together and cache alike")
    least = min(p.num_tokens for p, _ in pairs)

    def cost(pair: tuple[PrefillLoad, DecodeLoad]) -> tuple[int, int, int, int, str]:
        p, d = pair
        is_preferred = p.name == preferred and p.num_tokens - least <= MAX_PREFERRED_LEAD
        return d.num_rows, 0 if is_preferred else 1, p.num_tokens, p.num_sent, d.name

    best = min(pairs, key=cost)
    return best[0].name, best[1].name
