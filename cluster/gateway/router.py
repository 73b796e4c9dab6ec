"""Which prefill rank and which decode rank serve a request: pure choices over loads."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from core.errors import NodeLost, Overloaded

MAX_PREFERRED_LEAD = 4096
"""Prompt tokens; beyond it waiting costs more than computing a known beginning again."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """``num_tokens`` are prompt tokens sent there and not yet answered, ``num_sent`` requests
    ever sent there."""

    name: str
    num_tokens: int
    fingerprint: str
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """``num_rows`` sequences of this gateway run there; ``max_rows`` can."""

    name: str
    num_rows: int
    max_rows: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Route:
    prefill: str
    decode: str


def usable_pairs(
    prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad], excluded: Collection[str]
) -> list[tuple[PrefillLoad, DecodeLoad]]:
    """Pairs that cache alike, of nodes that are not ``excluded``."""
    return [
        (p, d)
        for p in prefills
        for d in decodes
        if p.fingerprint == d.fingerprint and not {p.name, d.name} & set(excluded)
    ]


def choose_route(
    prefills: Sequence[PrefillLoad],
    decodes: Sequence[DecodeLoad],
    excluded: Collection[str] = (),
    preferred: str | None = None,
) -> Route:
    """The least loaded pair that caches alike; among equals the prefill node that got least.

    The ``preferred`` prefill node, which knows the prompt's beginning, counts as idle while it
    has at most MAX_PREFERRED_LEAD tokens more to compute than the least loaded one.

    Raises NodeLost when no such pair is left, Overloaded when every row is taken.
    """
    pairs = usable_pairs(prefills, decodes, excluded)
    if not pairs:
        layouts = {load.name: load.fingerprint for load in prefills}
        layouts |= {load.name: load.fingerprint for load in decodes}
        raise NodeLost(
            "no prefill and decode node are left that cache alike; "
            f"layouts: {layouts}, lost: {sorted(excluded)}"
        )
    free = [(p, d) for p, d in pairs if d.num_rows < d.max_rows]
    if not free:
        raise Overloaded(f"all {sum(d.max_rows for d in decodes)} decode rows are taken")
    least = min(p.num_tokens for p, _ in free)

    def cost(pair: tuple[PrefillLoad, DecodeLoad]) -> tuple[int, int, int, int, str]:
        p, d = pair
        is_preferred = p.name == preferred and p.num_tokens - least <= MAX_PREFERRED_LEAD
        return d.num_rows, 0 if is_preferred else 1, p.num_tokens, p.num_sent, d.name

    best = min(free, key=cost)
    return Route(best[0].name, best[1].name)
