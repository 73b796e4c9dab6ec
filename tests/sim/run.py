"""One seed from its begin to its end, and the shortest list of faults with which it still fails."""

import asyncio
import gc
import logging
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch

from tests.sim.checks import Checks
from tests.sim.clients import Clients
from tests.sim.fault import KINDS, OWN, RUSH_KINDS, RUSH_OWN, Fault, drawn
from tests.sim.faults import Faults
from tests.sim.loop import Deadlock, Process
from tests.sim.world import GATEWAYS, World

UP_S, SERVE_S, SETTLE_S = 12.0, 60.0, 240.0
MOST_CPU_S = 60
NUM_CLIENTS, NUM_FAULTS = 20, 10
RUSHES = 10_001
"""From this seed on clients come in rushes and may go away, and RUSH_KINDS are among the faults;
those before are kept as they were for what they found."""
RUSH, RUSH_S, EARLY_S, SLOW_STEP_S = 6, 0.3, 2.0, 0.1
"""Clients of one rush, within how long, and how soon before a fault; a step of an engine takes so
long that they meet."""
WALL = 1_700_000_000.0
SHAPES = (
    ("prefill.replicas=2", "decode.replicas=2"),
    ("prefill.replicas=2", "decode.replicas=1", "decode.dp_size=2"),
    ("prefill.replicas=2", "decode.replicas=2", "decode.dp_size=2"),
    ("prefill.replicas=1", "prefill.dp_size=2", "decode.replicas=2"),
    ("prefill.replicas=1", "decode.replicas=1"),
)


class TooLong(BaseException):
    """Whatever goes on is to end."""


@dataclass
class Result:
    seed: int
    trace: str
    failures: list[str]
    num_told: dict[str, int]
    num_faults: dict[str, int]
    faults: list[Fault]


def faults_of(seed: int) -> list[Fault]:
    draw = random.Random(f"faults {seed}")
    kinds = KINDS if seed < RUSHES else KINDS | RUSH_KINDS
    if seed % 4 == 0:
        kinds = {kind: often for kind, often in kinds.items() if kind in _own(seed)}
    return drawn(draw, kinds, NUM_FAULTS, UP_S, UP_S + SERVE_S)


def _own(seed: int) -> Sequence[str]:
    return OWN if seed < RUSHES else RUSH_OWN


def run_seed(seed: int, faults: Sequence[Fault] | None = None, keeps_log: bool = False) -> Result:
    """In a process of its own: it changes what threads and clocks are, for all."""
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.INFO if keeps_log else logging.CRITICAL + 1)
    gc.collect()
    gc.freeze()  # what is there now is not looked at again
    gc.disable()
    world = World(seed, *SHAPES[seed % len(SHAPES)])
    if seed >= RUSHES:
        world.loads.step_s = SLOW_STEP_S

    def end(*_: object) -> None:
        world.failures.append(f"it takes more than {MOST_CPU_S} s of a core: something never ends")
        raise TooLong

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        return _run(world, list(faults_of(seed) if faults is None else faults), keeps_log)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.enable()


def shortest(seed: int, faults: list[Fault]) -> list[Fault]:
    """Left out one by one as long as it fails without them."""
    i = 0
    while i < len(faults):
        fewer = faults[:i] + faults[i + 1 :]
        if run_seed(seed, fewer).failures:
            faults = fewer
        else:
            i += 1
    return faults


def _run(world: World, faults: list[Fault], keeps_log: bool) -> Result:
    world.keeps_log = keeps_log
    world.loop.set_exception_handler(lambda loop, told: _unhandled(world, told))
    applied = Faults(world, random.Random(f"chances {world.seed}"))
    if all(fault.kind in _own(world.seed) for fault in faults):
        world.ray.on_kill = lambda name: world.wrong(f"{name} was well and is killed")
    wall = lambda: WALL + world.loop.time() + applied.wall_offset_s  # noqa: E731
    with world.patched(), patch.object(time, "time", wall):
        driver = Process(world.loop, "driver")
        main = driver.start(_live(world, applied, faults))
        try:
            world.loop.run_until_complete(main)
        except TooLong:
            pass  # told already
        except (Deadlock, RuntimeError) as error:
            if not world.failures:
                world.failures.append(f"{world.loop.time():.3f}: {error!r}")
    return Result(
        world.seed, world.trace, world.failures, world.num_told, applied.num_applied, faults
    )


def _unhandled(world: World, told: dict) -> None:
    of = told.get("future") or told.get("task") or told.get("handle")
    world.wrong(f"{told['message']}: {told.get('exception')!r}, {of}")


def _arrivals(world: World) -> list[float]:
    """The same when some of the seed's faults are left out."""
    draw = world.draw.uniform
    if world.seed < RUSHES:
        return [draw(UP_S / 2, UP_S + SERVE_S) for _ in range(NUM_CLIENTS)]
    early = [fault.at - draw(0.0, EARLY_S) for fault in faults_of(world.seed)]
    rushes = [world.draw.choice(early) for _ in range(NUM_CLIENTS // RUSH)]
    rest = [draw(UP_S / 2, UP_S + SERVE_S) for _ in range(NUM_CLIENTS % RUSH)]
    return rest + [at + draw(0.0, RUSH_S) for at in rushes for _ in range(RUSH)]


async def _live(world: World, applied: Faults, faults: list[Fault]) -> None:
    checks = Checks(world)
    clients = Clients(world, random.Random(world.draw.random()))

    def apply(fault: Fault) -> None:
        applied.apply(fault)
        checks.look()

    for _ in range(3):
        world.add_machine(4.0)
    for name in GATEWAYS:
        world.begin_gateway(name)
    for at in _arrivals(world):
        made = clients.make(may_leave=world.seed >= RUSHES)
        world.loop.call_later(at, clients.begin, made)
    for fault in faults:
        world.loop.call_later(fault.at, apply, fault)
    for _ in range(int(UP_S + SERVE_S)):
        checks.look()
        await asyncio.sleep(1.0)  # time: virtual
    applied.end()
    rest = "nothing was looked at"
    for _ in range(int(SETTLE_S)):
        checks.look()
        waiting = [f"client {c.number}: {c.last_failure}" for c in clients.all if not c.is_done]
        rest = waiting[0] if waiting else checks.is_whole()
        if not rest:
            return await checks.all_pairs_work()
        await asyncio.sleep(1.0)  # time: virtual
    world.wrong(f"not whole after {SETTLE_S:.0f} s: {rest}")
