"""The faults of a seed and their times: a list that is drawn once, so that it can be shortened."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault in the form that ``--fault`` takes as text.

    Attributes:
        at: Time in seconds.
        number: Chooses among the targets that exist at that time.
        for_s: Duration in seconds.
    """

    at: float
    kind: str
    number: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.at:.6f},{self.kind},{self.number},{self.for_s}"

    @classmethod
    def of(cls, text: str) -> "Fault":
        """Parse a fault. Raises ValueError for an unknown kind or a malformed text."""
        at, kind, number, for_s = text.split(",")
        if kind not in ALL_KINDS:
            raise ValueError(f"{kind!r} is no fault; use one of {', '.join(ALL_KINDS)}")
        return cls(float(at), kind, int(number), float(for_s))


KINDS = {
    "kill rank": 4,
    "stop rank": 3,
    "kill gateway": 1,
    "stop gateway": 1,
    "kill controller": 2,
    "lose machine": 1,
    "drain machine": 1,
    "late machine": 1,
    "lose calls": 4,
    "cut": 3,
    "lose head": 2,
    "fail step": 2,
    "slow rank": 3,
    "drain": 2,
    "clock back": 1,
}
"""Weight of each kind when faults are drawn."""
RUSH_KINDS = {"slow wire": 3, "reset": 3, "reset in call": 2, "die in call": 4}
"""Additional kinds for seeds whose requests come in rushes."""
EDGE_KINDS = {"fail arrival": 2, "odd error": 1, "part pair": 3, "rebalance": 2}
"""Additional kinds for seeds whose gateways have little capacity."""
OPERATOR_KINDS = {
    "other config": 3,
    "crash loop": 3,
    "move link": 3,
    "roll out": 1,
    "rebalance": 1,
    "kill rank": 3,
    "kill gateway": 1,
    "kill controller": 1,
}
"""Kinds drawn when an operator changes config or checkpoint."""
PARTIAL_KINDS = {
    "part pair": 3,
    "rebalance": 3,
    "drain machine": 2,
    "kill gateway": 1,
    "fail arrival": 1,
    "odd error": 1,
}
"""Kinds drawn when most of the cluster works after each fault."""
HOSTILE_KINDS = {"trickle": 2, "half read": 1, "long texts": 2, "claims": 2}
"""Kinds drawn when clients are hostile: clients that might harm well-behaved ones."""
ALL_KINDS = tuple(KINDS | RUSH_KINDS | EDGE_KINDS | OPERATOR_KINDS | HOSTILE_KINDS)
LASTING = (
    *("stop rank", "stop gateway", "lose machine", "drain machine", "lose calls", "cut"),
    *("lose head", "slow rank", "slow wire", "part pair", "crash loop", "move link", "roll out"),
)
"""Kinds during which the cluster may be unhealthy."""
FAILS_STEP = "fail step", "fail arrival"
"""Kinds that a seed has at most once: a request that is in two failing steps may be refused."""
OWN = "kill rank", "kill gateway", "kill controller", "late machine", "clock back", "fail step"
"""Kinds that touch at most one process. If a seed has only these, no other process may end."""
RUSH_OWN = *OWN, "lose head", "slow wire", "reset in call", "die in call"
"""The same for seeds whose requests come in rushes."""
EDGE_OWN = "fail arrival", "odd error"
"""The same for seeds whose gateways have little capacity."""
CLOSE, CLOSE_S = 0.4, 3.0
"""Share of faults that follow another one soon, and the maximum distance in seconds."""


def drawn(
    draw: random.Random, often: dict[str, int], num: int, first: float, last: float
) -> list[Fault]:
    faults: list[Fault] = []
    for kind in draw.choices([*often], [*often.values()], k=num):
        at = draw.uniform(first, last)
        if faults and draw.random() < CLOSE:
            at = min(last, draw.choice(faults).at + draw.uniform(0.0, CLOSE_S))
        for_s = draw.choice((1, 3, 7, 20))
        faults.append(Fault(round(at, 6), kind, draw.randrange(1 << 30), for_s))
    failing = [fault for fault in faults if fault.kind in FAILS_STEP]
    for fault in failing[1:]:
        faults.remove(fault)
    return sorted(faults, key=lambda fault: fault.at)
