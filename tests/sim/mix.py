"""The composition of a seed: its cluster, the arrival of requests, and the kinds of faults.

Seeds below RUSHES and below EDGES keep their meaning, because some of them once found bugs.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.sim.fault import (
    EDGE_KINDS,
    EDGE_OWN,
    HOSTILE_KINDS,
    KINDS,
    OPERATOR_KINDS,
    OWN,
    PARTIAL_KINDS,
    RUSH_KINDS,
    RUSH_OWN,
    Fault,
    drawn,
)

UP_S, SERVE_S = 12.0, 60.0
NUM_CLIENTS, NUM_FAULTS = 20, 10
RUSHES = 10_001
"""First seed whose requests come in rushes, whose clients may leave early, and whose faults may be
RUSH_KINDS."""
EDGES = 20_001
"""First seed with full gateways, every option of a request, operators and hostile clients."""
RUSH, RUSH_S, EARLY_S, SLOW_STEP_S = 6, 0.3, 2.0, 0.1
"""Clients of a rush, its duration, its maximum lead before a fault, and a step time long enough
that steps and faults coincide."""
SHAPES = (
    ("prefill.replicas=2", "decode.replicas=2"),
    ("prefill.replicas=2", "decode.replicas=1", "decode.dp_size=2"),
    ("prefill.replicas=2", "decode.replicas=2", "decode.dp_size=2"),
    ("prefill.replicas=1", "prefill.dp_size=2", "decode.replicas=2"),
    ("prefill.replicas=1", "decode.replicas=1"),
)
GATEWAYS = {"g0": "m0", "g1": "away"}
"""Machine that each gateway runs on."""
FAULTS, OPERATOR, PARTIAL, HOSTILE = "faults", "operator", "partial", "hostile"
"""Themes of seeds from EDGES on:

- ``FAULTS``: faults of all kinds.
- ``OPERATOR``: an operator changes config or checkpoint.
- ``PARTIAL``: a few faults, after each of which most of the cluster works.
- ``HOSTILE``: hostile clients and no other fault.
"""
STEPS_S = 0.01, SLOW_STEP_S
THEMES = {FAULTS: 3, OPERATOR: 3, PARTIAL: 2, HOSTILE: 2}


@dataclass(frozen=True)
class Mix:
    """Composition of one seed.

    Attributes:
        sets: Overrides of the cluster's config.
        kinds: Weight of each kind of fault.
        own: Kinds of faults that touch one process alone.
        step_s: Seconds that a step of an engine takes.
        comes_in_rushes: Requests come together, shortly before a fault.
        is_edge: Requests have every option and gateways have little capacity.
        gateways: Machine of each gateway, by its name.
        machines: CPUs of each machine.
    """

    sets: tuple[str, ...]
    kinds: Mapping[str, int]
    own: Sequence[str]
    num_faults: int = NUM_FAULTS
    step_s: float = 0.01
    comes_in_rushes: bool = True
    is_edge: bool = False
    gateways: Mapping[str, str] = field(default_factory=lambda: GATEWAYS)
    machines: tuple[float, ...] = (4.0, 4.0, 4.0)

    @property
    def is_hostile(self) -> bool:
        return self.kinds is HOSTILE_KINDS


def mix_of(seed: int) -> Mix:
    """Return the composition of ``seed``."""
    shape = SHAPES[seed % len(SHAPES)]
    if seed < RUSHES:
        return Mix(shape, KINDS, OWN, comes_in_rushes=False)
    if seed < EDGES:
        return Mix(shape, KINDS | RUSH_KINDS, RUSH_OWN, step_s=SLOW_STEP_S)
    return _edge_mix(seed, shape)


def faults_of(seed: int) -> list[Fault]:
    """Return the faults of ``seed``, in the order of their times."""
    draw, mix = random.Random(f"faults {seed}"), mix_of(seed)
    kinds = mix.kinds
    if seed % 4 == 0 and mix.own:
        kinds = {kind: often for kind, often in kinds.items() if kind in mix.own}
    return drawn(draw, kinds, mix.num_faults, UP_S, UP_S + SERVE_S)


def arrivals_of(seed: int, draw: random.Random) -> list[float]:
    """Return the arrival time of each client, which does not depend on the faults."""
    mix, uniform = mix_of(seed), draw.uniform
    if not mix.comes_in_rushes:
        return [uniform(UP_S / 2, UP_S + SERVE_S) for _ in range(NUM_CLIENTS)]
    if mix.is_hostile:
        early = [fault.at + uniform(0.0, fault.for_s) for fault in faults_of(seed)]
    else:
        early = [fault.at - uniform(0.0, EARLY_S) for fault in faults_of(seed)]
    rushes = [draw.choice(early) for _ in range(NUM_CLIENTS // RUSH)]
    alone = [uniform(UP_S / 2, UP_S + SERVE_S) for _ in range(NUM_CLIENTS % RUSH)]
    return alone + [at + uniform(0.0, RUSH_S) for at in rushes for _ in range(RUSH)]


def _edge_mix(seed: int, shape: tuple[str, ...]) -> Mix:
    draw = random.Random(f"mix {seed}")
    [theme] = draw.choices([*THEMES], [*THEMES.values()])
    num_queued, num_rows = draw.choice((1, 2, 4)), draw.choice((2, 3))
    if theme == HOSTILE:
        num_queued, num_rows = 6, 2
    room = f"server.max_queued={num_queued}", f"decode.max_num_seqs={num_rows}"
    sets = (*shape, *room, "server.write_timeout_s=4", f"speculation.drafter={_drafter(draw)}")
    usual = Mix(sets, {}, (), step_s=SLOW_STEP_S, is_edge=True, machines=(2.0,) * 4)
    if theme == HOSTILE:
        one, own = dict(list(GATEWAYS.items())[:1]), tuple(HOSTILE_KINDS)
        few = replace(usual, kinds=HOSTILE_KINDS, own=own, num_faults=2)
        return replace(few, step_s=min(STEPS_S), gateways=one)
    if theme == OPERATOR:
        return replace(usual, kinds=OPERATOR_KINDS, num_faults=6)
    if theme == PARTIAL:
        return replace(usual, kinds=PARTIAL_KINDS, num_faults=4)
    kinds = KINDS | RUSH_KINDS | EDGE_KINDS
    return replace(usual, kinds=kinds, own=(*RUSH_OWN, *EDGE_OWN), step_s=draw.choice(STEPS_S))


def _drafter(draw: random.Random) -> str:
    return draw.choice(("none", "none", "ngram"))
