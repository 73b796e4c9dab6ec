"""What goes wrong in a seed, and when: a list that is drawn once, so that it can be cut down."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``at`` so many seconds; ``number`` chooses among what there is then; ``for_s`` is how long it
    lasts. As text it is what ``--fault`` takes."""

    at: float
    kind: str
    number: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.at:.6f},{self.kind},{self.number},{self.for_s}"

    @classmethod
    def of(cls, text: str) -> "Fault":
        """Raises ValueError for what is no fault."""
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
"""How often each is drawn."""
RUSH_KINDS = {"slow wire": 3, "reset": 3, "reset in call": 2, "die in call": 4}
"""Drawn, too, where clients come in rushes."""
EDGE_KINDS = {"fail arrival": 2, "odd error": 1, "part pair": 3, "rebalance": 2}
"""Drawn, too, where gateways have little room."""
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
"""Drawn where an operator changes config or checkpoint."""
PARTIAL_KINDS = {
    "part pair": 3,
    "rebalance": 3,
    "drain machine": 2,
    "kill gateway": 1,
    "fail arrival": 1,
    "odd error": 1,
}
"""Drawn where most of the cluster works after each fault."""
HOSTILE_KINDS = {"trickle": 2, "half read": 1, "long texts": 2, "claims": 2}
"""Drawn where clients are hostile: by which of them honest clients might be harmed."""
ALL_KINDS = tuple(KINDS | RUSH_KINDS | EDGE_KINDS | OPERATOR_KINDS | HOSTILE_KINDS)
LASTING = (
    *("stop rank", "stop gateway", "lose machine", "drain machine", "lose calls", "cut"),
    *("lose head", "slow rank", "slow wire", "part pair", "crash loop", "move link", "roll out"),
)
"""Kinds of which a cluster may not be well for as long as they last."""
FAILS_STEP = "fail step", "fail arrival"
"""Kinds of which a seed has one at most: a request that is in two failing steps may be refused."""
OWN = "kill rank", "kill gateway", "kill controller", "late machine", "clock back", "fail step"
"""These touch one process or none: where there are no others nobody else's may end."""
RUSH_OWN = *OWN, "lose head", "slow wire", "reset in call", "die in call"
"""As these, where clients come in rushes."""
EDGE_OWN = "fail arrival", "odd error"
"""As these, where gateways have little room."""
CLOSE, CLOSE_S = 0.4, 3.0
"""How many come soon after another, and how soon."""


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
