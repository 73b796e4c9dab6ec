"""Run one seed from start to end, and find the shortest list of faults with which it still
fails."""

import gc
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch

from tests.sim.fault import Fault
from tests.sim.loop import Deadlock, Process
from tests.sim.mix import faults_of
from tests.sim.play import Play
from tests.sim.world import World

MOST_CPU_S = 60
WALL = 1_700_000_000.0


class TooLong(BaseException):
    """Raised to end a run that takes too much CPU time."""


@dataclass
class Result:
    seed: int
    trace: str
    failures: list[str]
    num_updates: dict[str, int]
    num_faults: dict[str, int]
    faults: list[Fault]
    longest_s: float


def run_seed(seed: int, faults: Sequence[Fault] | None = None, keeps_log: bool = False) -> Result:
    """Run a seed. Call it in a separate process, because it replaces threads and clocks
    globally."""
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.INFO if keeps_log else logging.CRITICAL + 1)
    gc.collect()
    gc.freeze()  # exclude existing objects from later collections
    gc.disable()
    world = World(seed)

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
    """Remove faults one by one as long as the seed still fails without them."""
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
    play = Play(world)
    if all(fault.kind in world.mix.own for fault in faults):
        world.ray.on_kill = lambda name: world.wrong(f"{name} was well and is killed")
    wall = lambda: WALL + world.loop.time() + play.faults.wall_offset_s  # noqa: E731
    with world.patched(), patch.object(time, "time", wall):
        driver = Process(world.loop, "driver")
        main = driver.start(play.live(faults))
        try:
            world.loop.run_until_complete(main)
        except TooLong:
            pass  # reported already
        except (Deadlock, RuntimeError) as error:
            if not world.failures:
                world.failures.append(f"{world.loop.time():.3f}: {error!r}")
    told = world.trace, world.failures, world.num_updates, play.faults.num_applied
    return Result(world.seed, *told, faults, play.service.longest_s)


def _unhandled(world: World, told: dict) -> None:
    of = told.get("future") or told.get("task") or told.get("handle")
    world.wrong(f"{told['message']}: {told.get('exception')!r}, {of}")
