"""The part of Ray's API that the controller and gateways use, over simulated machines.

The loss of a machine becomes known only after LOST_S. A controller that dies is restarted.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.exceptions import RayError

from tandem.cluster.control import actors, controller, machines, members
from tests.sim.actors import LOST_S, START_S, Actor, Call, Handle, Machine, Unavailable
from tests.sim.loop import PROCESS, Process, SimLoop, here
from tests.sim.net import Net
from tests.sim.threads import Threads


@dataclass(eq=False)
class Group:
    """A placement group.

    ``machines`` has the machine of each bundle and is empty while they do not fit. An entry is None
    after its machine was lost, until the bundle fits elsewhere.
    """

    name: str
    bundles: list[dict[str, float]]
    ray: "FakeRay"
    machines: list[Machine | None] = field(default_factory=list)
    is_removed: bool = False

    @property
    def bundle_count(self) -> int:
        return len(self.bundles)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the group is placed; blocks its thread."""
        for _ in range(int(timeout_s)):
            if self.ray.place(self):
                return True
            self.ray.threads.sleep(1.0)  # time: virtual
        return self.ray.place(self)


@dataclass(eq=False)
class Trouble:
    """Faults of one call; by default there are none."""

    before_s: float = 0.0
    is_refused: bool = False
    is_unanswered: bool = False
    is_doubled: bool = False


class FakeRay:
    """Ray of one cluster.

    ``told`` records events of processes and calls. ``trouble`` chooses the faults of each call, and
    ``fails`` says whether requests to Ray itself raise now. ``on_kill`` is called when Ray kills a
    live actor.
    """

    def __init__(
        self,
        loop: SimLoop,
        net: Net,
        threads: Threads,
        draw: random.Random,
        told: Callable[..., None],
    ) -> None:
        self.loop, self.net, self.threads, self.draw, self.told = loop, net, threads, draw, told
        self.machines: list[Machine] = []
        self.groups: dict[str, Group] = {}
        self.actors: dict[str, Actor] = {}
        self.actor_of: dict[Process, Actor] = {}
        self.trouble: Callable[[Actor, str], Trouble] = lambda actor, method: Trouble()
        self.fails: Callable[[], bool] = lambda: False
        self.on_kill: Callable[[str], None] = lambda name: None
        self.on_call: Callable[[Process | None, Actor, str], None] = lambda *called: None
        self.constructs_fail = False
        """Whether constructing an actor may fail because Ray does not answer."""
        self.odd_error: Callable[[Process | None, str], Exception | None] = lambda *called: None
        self._process = Process(loop, "ray")
        self.util = SimpleNamespace(
            list_named_actors=self._named, placement_group_table=self._table
        )

    def later(self, after_s: float, function: Callable[..., Any], *given: Any) -> None:
        """Call a function later in Ray's process, which no fault stops."""
        self._process.call(function, *given, after_s=after_s)

    def _answers(self) -> None:
        if self.fails():
            raise RayError("the GCS does not answer")

    # Requests to Ray itself

    def get_actor(self, name: str, namespace: str = "") -> Handle:
        self._answers()
        actor = self.actors.get(name)
        if actor is None or actor.is_dead:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        return Handle(actor)

    def kill(self, handle: Handle) -> None:
        self._answers()
        handle.actor.kill()

    def get_runtime_context(self) -> Any:
        if self.constructs_fail:
            self._answers()
        return SimpleNamespace(current_actor=Handle(self.actor_of[here()]))

    def remote(self, what: Any) -> Any:
        def options(**given: Any) -> Any:
            def make(*args: Any) -> Any:
                return self._make(what, args, given)

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def nodes(self) -> list[dict[str, Any]]:
        self._answers()
        return [
            {
                "NodeID": one.name,
                "NodeManagerAddress": one.address,
                "Alive": not one.is_known_lost,
                "Labels": {},
                "Resources": {"CPU": one.num_cpus},
            }
            for one in self.machines
        ]

    def free_resources_by_node(self) -> dict[str, dict[str, float]]:
        self._answers()
        return {one.name: {"CPU": one.num_cpus - one.used} for one in self.machines}

    def get(self, told: Callable[[], Any], timeout: float = 0.0) -> Any:
        """Return the result of a task that ran in another process."""
        self.threads.sleep(self.draw.uniform(0.01, 0.3))  # time: virtual
        return told()

    # Placement groups

    def placement_group(
        self,
        bundles: Any,
        strategy: str,
        name: str,
        lifetime: str,
        bundle_label_selector: list[dict[str, str]],
    ) -> Group:
        """Create a placement group. No simulated machine has labels."""
        self._answers()
        assert not any(bundle_label_selector)
        group = self.groups[name] = Group(name, bundles, self)
        return group

    def get_placement_group(self, name: str) -> Group:
        self._answers()
        if name not in self.groups:
            raise ValueError(f"Failed to look up placement group with name {name}")
        return self.groups[name]

    def remove_placement_group(self, group: Group) -> None:
        if self.groups.pop(group.name, None) is None:
            return
        group.is_removed = True
        for machine, bundle in zip(group.machines, group.bundles, strict=False):
            if machine is not None:
                machine.used -= bundle["CPU"]
        for actor in self.actors.values():
            if actor.options.get("group") is group and not actor.is_dead:
                actor.kill()

    def _open(self) -> list[Machine]:
        """Return the machines on which something may be placed."""
        return [one for one in self.machines if not (one.is_known_lost or one.is_draining)]

    def place(self, group: Group) -> bool:
        """Place the group on the minimum number of machines."""
        if group.machines or group.is_removed:
            return bool(group.machines)
        want = sum(bundle["CPU"] for bundle in group.bundles)
        alive = self._open()
        for machine in alive:
            if machine.num_cpus - machine.used >= want:
                group.machines = [machine] * len(group.bundles)
                machine.used += want
                return True
        free = {one.name: one.num_cpus - one.used for one in alive}
        found: list[Machine | None] = []
        for bundle in group.bundles:
            machine = next((m for m in alive if free[m.name] >= bundle["CPU"]), None)  # type: ignore[assignment]
            if machine is None:
                return False
            free[machine.name] -= bundle["CPU"]
            found.append(machine)
        group.machines = found
        for one, bundle in zip(found, group.bundles, strict=True):
            assert one is not None
            one.used += bundle["CPU"]
        return True

    def _table(self, group: Group | None = None) -> Any:
        self._answers()
        told = [one for one in (group, *self.groups.values()) if one is not None]
        tables = [
            {
                "name": one.name,
                "state": "CREATED",
                "bundles_to_node_id": {
                    i: machine.name for i, machine in enumerate(one.machines) if machine is not None
                },
            }
            for one in told
        ]
        return tables[0] if group is not None else {table["name"]: table for table in tables}

    def draining_nodes(self) -> set[str]:
        self._answers()
        return {one.name for one in self.machines if one.is_draining and not one.is_known_lost}

    def _named(self, all_namespaces: bool) -> list[dict[str, str]]:
        self._answers()
        alive = [actor for actor in self.actors.values() if not actor.is_dead]
        return [{"namespace": "tandem", "name": actor.name} for actor in alive]

    # Actors and their calls

    def _make(self, what: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not isinstance(what, type):
            return lambda: what(*given)
        name = options["name"]
        if options.get("get_if_exists") and name in self.actors and not self.actors[name].is_dead:
            return Handle(self.actors[name])
        machine = self.machines[0]
        if (strategy := options.pop("scheduling_strategy", None)) is not None:
            options["group"] = strategy.group
            machine = strategy.group.machines[strategy.index]
        actor = self.actors[name] = Actor(self, what, given, options, machine)
        if machine is not None and machine.is_alive:
            self.later(self.draw.uniform(0.5, 1.5) * START_S, actor.begin)
        else:
            self.later(LOST_S, actor.bury)
        return Handle(actor)

    def call(self, actor: Actor, method: str, given: tuple[Any, ...]) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = self.loop.create_future()
        if (error := self.odd_error(PROCESS.get(), method)) is not None:
            raise error
        caller, trouble = PROCESS.get(), self.trouble(actor, method)
        what = given[1] if method == "call" else ""
        self.told("call", caller and caller.name, actor.name, method, what)
        call = Call(actor, method, given, caller, answer, trouble.is_unanswered)
        if trouble.is_refused:
            call.fail(Unavailable("the call was lost"))
            return answer
        call.send(self.net.latency_s() + trouble.before_s)
        self.on_call(caller, actor, what or method)
        if trouble.is_doubled:
            again: asyncio.Future[Any] = self.loop.create_future()
            Call(actor, method, given, None, again).send(
                self.net.latency_s() + self.draw.choice((0.0, 0.05))
            )
        return answer

    # Machines

    def lose(self, machine: Machine) -> None:
        """Lose a machine and all its processes at once, without any notification."""
        machine.is_alive = False
        for actor in self.actors.values():
            if actor.machine is machine and actor.process is not None:
                actor.process.kill(is_gone=True)

        def known() -> None:
            machine.is_known_lost = True
            for group in self.groups.values():
                group.machines = [None if one is machine else one for one in group.machines]
            self.later(1.0, self._move)

        self.later(LOST_S, known)

    def _move(self) -> None:
        """Move bundles of lost machines to machines with free CPUs."""
        for group in self.groups.values():
            homeless = [i for i, one in enumerate(group.machines) if one is None]
            for i in homeless:
                want = group.bundles[i]["CPU"]
                alive = self._open()
                found = next((m for m in alive if m.num_cpus - m.used >= want), None)
                if found is not None:
                    found.used += want
                    group.machines[i] = found
        if any(None in group.machines for group in self.groups.values()):
            self.later(1.0, self._move)

    def patched(self) -> list[Any]:
        """Return patches of the modules that use Ray."""
        strategies = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, index: SimpleNamespace(
                group=group, index=index
            ),
            NodeAffinitySchedulingStrategy=lambda node, soft: None,
        )
        names = (
            *("get_placement_group", "placement_group", "remove_placement_group"),
            *("draining_nodes", "free_resources_by_node"),
        )
        return [
            *(
                patch.object(module, "ray", self)
                for module in (actors, controller, machines, members)
            ),
            *(patch.object(machines, name, getattr(self, name)) for name in names),
            patch.object(machines, "scheduling", strategies),
        ]
