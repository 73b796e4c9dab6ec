"""Runs inside a controller under test: kill it in a requested phase, and move experts.

Files in $FAULTS control it:

- ``end.controller`` names phases, one a line. In the middle of the first of them that occurs, the
  controller records itself in ``ended.controllers`` and dies.
- ``rebalance`` names a gang. Its experts are placed again, even if nothing is gained.
- ``stopped.ranks`` receives the processes that end by a rebalance, as ``HOST PID`` seen from
  inside their machine.
"""

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.cluster.control import rebalance
from tandem.core.membership import DRAINING, LOST, STARTING
from tests.faults.timeline import note_gang

PHASES = "adoption", "load", "join", "replacement", "pause", "drain"
LOOK_S, LATER_S = 0.005, 0.3
KNOWN: dict[str, Any] = {}
"""Latest state reported by each rank, by process name. A rank that has just died has reported
none."""


def there(name: str) -> Path:
    return Path(os.environ["FAULTS"], name)


def note(name: str, line: str) -> None:
    with there(name).open("a") as file:
        file.write(f"{line}\n")


def phases(controller: Any) -> set[str]:
    """Return all phases that the controller is in the middle of."""
    if controller._epochs.seen[0] == 0:
        return {"adoption"}
    return {_of(supervisor) for supervisor in controller._gangs.values()}


def _of(supervisor: Any) -> str:
    gang, states, num_ranks = supervisor.gang, supervisor.ranks.states, supervisor.plan.num_ranks
    if gang.state in (DRAINING, LOST):
        return "drain" if gang.state == DRAINING else "pause"
    if gang.state != STARTING:
        return ""
    num_loaded = sum(
        rank in supervisor.ranks.handles and one.is_loaded for rank, one in states.items()
    )
    if num_loaded == num_ranks:
        return "join"
    return "replacement" if num_loaded else "load"


async def watch(controller: Any) -> None:
    gangs: dict[str, Any] = {}
    while True:
        for supervisor in controller._gangs.values():
            if gangs.get(supervisor.plan.name) != supervisor.gang:
                gangs[supervisor.plan.name] = supervisor.gang
                note_gang(supervisor.gang)
            KNOWN.update({s.spec.process_name: s for s in supervisor.ranks.states.values()})
        await asyncio.sleep(LOOK_S)  # time: between two looks
        with suppress(FileNotFoundError):
            gang = there("rebalance").read_text()
            there("rebalance").unlink()
            asyncio.get_running_loop().create_task(controller.rebalance(gang))
        with suppress(FileNotFoundError):
            asked = set(there("end.controller").read_text().split("\n"))
            for phase in asked & phases(controller):
                await asyncio.sleep(random.uniform(0.0, LATER_S))  # time: in the middle of it
                if phase in phases(controller):
                    there("end.controller").unlink()
                    note("ended.controllers", phase)
                    os.kill(os.getpid(), signal.SIGKILL)


def watched(module: Any) -> None:
    """Watch each controller of tandem.cluster.control.controller from its creation on."""
    begin, stop = module.Controller.ensure_adopted, module.GangSupervisor.stop
    rebalance.MIN_GAIN = -1.0

    async def beginning(self: Any) -> None:
        if not hasattr(self, "_watch"):
            self._watch = asyncio.get_running_loop().create_task(watch(self))
        await begin(self)

    async def stopping(self: Any, deadline_s: float) -> None:
        for state in filter(None, (KNOWN.get(rank.name) for rank in self.ranks.handles.values())):
            note("stopped.ranks", f"{state.spec.host} {state.pid}")
        await stop(self, deadline_s)

    module.Controller.ensure_adopted, module.GangSupervisor.stop = beginning, stopping
