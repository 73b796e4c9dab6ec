"""The effect of each fault on a world."""

import asyncio
import random
from contextlib import suppress
from functools import partial
from typing import Any

from tandem.cluster.control.drain import drain_and_restart
from tandem.cluster.control.gang_supervisor import GangSupervisor
from tandem.cluster.control.machines import CONTROLLER
from tandem.core.errors import TandemError
from tandem.core.membership import READY
from tests.sim.actors import Actor, Machine
from tests.sim.fake_ray import Trouble
from tests.sim.fault import Fault
from tests.sim.loop import Process
from tests.sim.model import OTHER_WEIGHTS, WEIGHTS
from tests.sim.net import Transport
from tests.sim.world import Gateway, World

CALLS = (
    *("grant", "start", "prefill", "abort", "cancel", "heartbeat"),
    *(
        "get_state",
        "open_rendezvous",
        "join",
        "leave",
        "ensure_adopted",
        "attach",
        "membership",
        "report",
    ),
)
"""Calls during which the caller or the receiver may die."""
BREAKING = "connect", "pull", "send", "checksums", "renew", "release", "close_channel"
"""Calls from decode to prefill during which their connection may break."""
SLOW_S, COPY_S, GATEWAY_S, CALL_S, REACH_S = 6.0, 12.0, 2.0, 0.01, 0.0031
CHANCES = {"refused": 0.04, "unanswered": 0.04, "doubled": 0.04, "slow": 0.1}
"""Probability of each fault of a call while calls are disturbed."""


class Faults:
    """Applies faults to a world, each in a separate step."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.world, self._draw = world, draw
        self._trouble_until = 0.0
        self._cuts: dict[tuple[str, str], float] = {}
        self.wall_offset_s = 0.0
        self.num_applied: dict[str, int] = {}
        self._no_head_until = self._slow_until = 0.0
        world.wires.extra_s = self._extra_s
        self._dying: list[tuple[str, bool]] = []
        self._breaking: list[tuple[bytes, bool]] = []
        world.ray.on_call = self._called
        world.net.on_write = self._written
        world.ray.trouble = self._trouble
        world.ray.fails = self._fails
        world.net.is_cut = lambda a, b: (
            self._is_cut(a.machine, b.machine) or self._is_cut(a.name, b.name)
        )

    def apply(self, fault: Fault) -> None:
        done = getattr(self, f"_{fault.kind.replace(' ', '_')}")(fault)
        if done:
            self.num_applied[fault.kind] = self.num_applied.get(fault.kind, 0) + 1
            self.world.told("fault", fault.kind, done)

    def end(self) -> None:
        """End all faults."""
        world = self.world
        self._trouble_until, self._no_head_until, self._cuts = 0.0, 0.0, {}
        self._slow_until, self._dying, self._breaking = 0.0, [], []
        world.loads.failing.clear()
        world.loads.slow.clear()
        world.net.heal()
        for actor in self._actors():
            if actor.process is not None and actor.process.is_stopped:
                actor.process.resume()
        for gateway in world.gateways:
            if gateway.process.is_stopped:
                gateway.process.resume()

    def _actors(self, is_rank: bool = True) -> list[Actor]:
        found = self.world.ray.actors.values()
        return [
            one
            for one in found
            if one.process is not None
            and one.process.is_alive
            and (one.name != CONTROLLER) == is_rank
        ]

    def _kill_rank(self, fault: Fault) -> str:
        ranks = self._actors()
        if not ranks:
            return ""
        rank = ranks[fault.number % len(ranks)]
        assert rank.process is not None
        rank.process.kill()
        return rank.name

    def _fail_step(self, fault: Fault) -> str:
        ranks = self._actors()
        if not ranks:
            return ""
        name = ranks[fault.number % len(ranks)].name
        self.world.loads.failing.add(name)
        return name

    def _move_link(self, fault: Fault) -> str:
        loads = self.world.loads
        loads.weights = OTHER_WEIGHTS
        self.world.loop.call_later(fault.for_s, setattr, loads, "weights", WEIGHTS)
        return f"for {fault.for_s} s"

    def _slow_rank(self, fault: Fault) -> str:
        ranks = self._actors()
        if not ranks:
            return ""
        name = ranks[fault.number % len(ranks)].name
        self.world.loads.slow[name] = self.world.loop.time() + fault.for_s
        return f"{name} for {fault.for_s} s"

    def _stop_rank(self, fault: Fault) -> str:
        ranks = [one for one in self._actors() if one.process and not one.process.is_stopped]
        if not ranks:
            return ""
        process = ranks[fault.number % len(ranks)].process
        assert process is not None
        process.stop()
        self._later_passes(fault.for_s, lambda: process.is_stopped and process.resume())
        return process.name

    def _kill_gateway(self, fault: Fault) -> str:
        gateway = self.world.gateways[fault.number % len(self.world.gateways)]
        return gateway.name if self._end_gateway(gateway) else ""

    def _end_gateway(self, gateway: Gateway) -> bool:
        """End a gateway and start another one in its place; return whether it was alive."""
        if not gateway.process.is_alive:
            return False
        gateway.process.kill()
        self._later_passes(GATEWAY_S, lambda: self.world.begin_gateway(gateway.name))
        return True

    def _stop_gateway(self, fault: Fault) -> str:
        process = self.world.gateways[fault.number % len(self.world.gateways)].process
        if process.is_stopped or not process.is_alive:
            return ""
        process.stop()
        self._later_passes(fault.for_s, lambda: process.is_stopped and process.resume())
        return process.name

    def _kill_controller(self, fault: Fault) -> str:
        for one in self._actors(is_rank=False):
            assert one.process is not None
            one.process.kill()
            return one.name
        return ""

    def _drain(self, fault: Fault) -> str:
        """Restart a gang, as for a rebalance of its experts. Its controller may die while it does
        so."""
        for one in self._actors(is_rank=False):
            gangs = one.instance._gangs if one.instance is not None else {}
            ready = [supervisor for supervisor in gangs.values() if supervisor.gang.state == READY]
            if ready and one.process is not None and not one.process.is_stopped:
                supervisor = ready[fault.number % len(ready)]
                one.process.start(self._moved(supervisor, one.instance._change_lock))
                return str(supervisor.gang.name)
        return ""

    async def _moved(self, supervisor: GangSupervisor, change_lock: asyncio.Lock) -> None:
        with suppress(TandemError):
            await drain_and_restart(supervisor, change_lock, supervisor.placement)

    def _lose_machine(self, fault: Fault) -> str:
        """Lose a machine except the head, which Ray needs. Another one takes its place."""
        machines = [one for one in self.world.ray.machines[1:] if one.is_alive]
        if not machines:
            return ""
        lost: Machine = machines[fault.number % len(machines)]
        self.world.ray.lose(lost)
        self._later_passes(fault.for_s, lambda: self.world.add_machine(lost.num_cpus))
        return lost.name

    def _drain_machine(self, fault: Fault) -> str:
        """Drain a machine: nothing more is placed there, and it goes. Another one takes its
        place."""
        machines = [
            one for one in self.world.ray.machines[1:] if one.is_alive and not one.is_draining
        ]
        if not machines:
            return ""
        going: Machine = machines[fault.number % len(machines)]
        going.is_draining = True
        self._later_passes(fault.for_s, lambda: going.is_alive and self.world.ray.lose(going))
        self._later_passes(fault.for_s, lambda: self.world.add_machine(going.num_cpus))
        return going.name

    def _late_machine(self, fault: Fault) -> str:
        return self.world.add_machine(4.0).name if len(self.world.ray.machines) < 5 else ""

    def _lose_calls(self, fault: Fault) -> str:
        self._trouble_until = self.world.loop.time() + fault.for_s
        return f"{fault.for_s} s"

    def _lose_head(self, fault: Fault) -> str:
        """Requests to Ray itself raise or not, at random; calls to actors arrive."""
        self._no_head_until = self.world.loop.time() + fault.for_s
        return f"{fault.for_s} s"

    def _fails(self) -> bool:
        return self.world.loop.time() < self._no_head_until and self._draw.random() < 0.6

    def _cut(self, fault: Fault) -> str:
        first, second = self._two_machines(fault)
        if first == second:
            return ""
        is_one_way = fault.number // 49 % 3 == 0
        for way in [(first, second), (second, first)][: 1 if is_one_way else 2]:
            self._cuts[way] = self.world.loop.time() + fault.for_s
        self._later_passes(fault.for_s + 0.001, self.world.net.heal)
        return f"{first} {'to' if is_one_way else 'and'} {second}"

    def _slow_wire(self, fault: Fault) -> str:
        """Copies that start within that time are slow but do not time out. Some outlast a lease."""
        self._slow_until = self.world.loop.time() + fault.for_s
        self.world.wires.most_extra_s = COPY_S
        return f"{fault.for_s} s"

    def _extra_s(self) -> float:
        is_slow = self.world.loop.time() < self._slow_until
        return self._draw.uniform(0.0, COPY_S) if is_slow else 0.0

    def _two_machines(self, fault: Fault) -> tuple[str, str]:
        """Return two machines, which may be the same one."""
        names = [*(one.name for one in self.world.ray.machines if one.is_alive), "away"]
        return names[fault.number % len(names)], names[fault.number // 7 % len(names)]

    def _reset(self, fault: Fault) -> str:
        """Reset all connections between two machines, or within one."""
        machines = {*self._two_machines(fault)}
        self.world.wires.reset(machines)
        return f"{sorted(machines)}" if self.world.net.reset(machines) else ""

    def _reset_in_call(self, fault: Fault) -> str:
        """Lose the next such call or its answer."""
        turn, place = divmod(fault.number, len(BREAKING))
        what, arrives = BREAKING[place], turn % 2 == 0
        self._breaking.append((what.encode(), arrives))
        return f"{what}, which {'arrives' if arrives else 'is lost'}"

    def _written(self, end: Transport, data: bytes) -> None:
        for breaking in [one for one in self._breaking if one[0] in data]:
            self._breaking.remove(breaking)
            self.world.told("reset in call", *breaking)
            after_s = REACH_S if breaking[1] else 0.0
            for one in (end, end.peer):
                one.process.call(one.reset, after_s=after_s)

    def _die_in_call(self, fault: Fault) -> str:
        """Kill the sender of the next such call once it is sent, or its receiver."""
        turn, place = divmod(fault.number, len(CALLS))
        what, is_caller = CALLS[place], turn % 2 == 0
        self._dying.append((what, is_caller))
        return f"{what}, {'who calls' if is_caller else 'who is called'}"

    def _called(self, caller: Process | None, actor: Actor, what: str) -> None:
        for dying in [one for one in self._dying if one[0] == what]:
            victim = caller if dying[1] else actor.process
            gateway = next((g for g in self.world.gateways if g.process is victim), None)
            if gateway is not None:
                self._later_passes(0.0, partial(self._end_gateway, gateway))
            elif victim in self.world.ray.actor_of:
                self._later_passes(
                    0.0 if dying[1] else self._draw.uniform(0.0, CALL_S), victim.kill
                )
            else:
                continue
            self._dying.remove(dying)
            self.world.told("dies in call", *dying)

    def _clock_back(self, fault: Fault) -> str:
        self.wall_offset_s -= 3600.0
        return "an hour"

    def _is_cut(self, a: str, b: str) -> bool:
        """Whether traffic from ``a`` to ``b`` is lost. Both are machines, or processes on them."""
        return self.world.loop.time() < self._cuts.get((a, b), 0.0)

    def _trouble(self, actor: Actor, method: str) -> Trouble:
        if self.world.loop.time() >= self._trouble_until:
            return Trouble()
        drawn_ = {name: self._draw.random() < share for name, share in CHANCES.items()}
        return Trouble(
            before_s=self._draw.uniform(0, SLOW_S) if drawn_["slow"] else 0.0,
            is_refused=drawn_["refused"],
            is_unanswered=drawn_["unanswered"],
            is_doubled=drawn_["doubled"] and method == "call",
        )

    def _later_passes(self, after_s: float, function: Any) -> None:
        self.world.ray.later(after_s, function)
