"""Which prefill rank and which decode rank serve a request: pure choices over loads."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from core.errors import NodeLost, Overloaded


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """``num_tokens`` are prompt tokens sent there and not yet answered."""

    name: str
    num_tokens: int
    fingerprint: str


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


def choose_route(
    prefills: Sequence[PrefillLoad],
    decodes: Sequence[DecodeLoad],
    excluded: Collection[str] = (),
) -> Route:
    """The least loaded pair that caches alike, names in order among equals.

    Raises NodeLost when no such pair is left, Overloaded when every row is taken.
    """
    pairs = [
        (p, d)
        for p in prefills
        for d in decodes
        if p.fingerprint == d.fingerprint and p.name not in excluded and d.name not in excluded
    ]
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
    best = min(free, key=lambda pd: (pd[1].num_rows, pd[0].num_tokens, pd[0].name, pd[1].name))
    return Route(best[0].name, best[1].name)
