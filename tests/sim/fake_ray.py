"""What the controller and the gateways ask of Ray, over simulated machines and processes.

Actors are processes; calls to them are messages, which ``trouble`` may fail, delay or double. A
machine that is lost is known to be only after LOST_S; a controller is started again.
"""

import asyncio
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from tests.sim.loop import PROCESS, Process, SimLoop
from tests.sim.net import Net
from tests.sim.threads import Threads

CUT_S = 0.5
"""Between tries to get through."""
START_S, NOTICE_S, LOST_S, KILL_STOPPED_S = 0.4, 0.05, 15.0, 5.0


class TaskFailed(RayError):
    """What an actor's method raised."""


class Died(ActorDiedError):
    def __init__(self, text: str) -> None:
        RayError.__init__(self, text)

    __str__ = RayError.__str__


class Unavailable(ActorUnavailableError):
    def __init__(self, text: str) -> None:
        RayError.__init__(self, text)

    __str__ = RayError.__str__


@dataclass(eq=False)
class Machine:
    name: str
    address: str
    num_cpus: float
    is_alive: bool = True
    is_known_lost: bool = False
    used: float = 0.0


@dataclass(eq=False)
class Group:
    """A placement group; ``machines`` are those of its bundles, none while there is no room."""

    name: str
    bundles: list[dict[str, float]]
    ray: "FakeRay"
    machines: list[Machine] = field(default_factory=list)
    is_removed: bool = False

    def wait(self, timeout_s: float) -> bool:
        """Blocks its thread."""
        for _ in range(int(timeout_s)):
            if self.ray.place(self):
                return True
            self.ray.threads.sleep(1.0)
        return self.ray.place(self)


@dataclass(eq=False)
class Actor:
    """``calls`` under way are those that its death fails, or, if it is started again, repeats."""

    ray: "FakeRay"
    cls: type
    given: tuple[Any, ...]
    options: dict[str, Any]
    machine: Machine
    process: Process | None = None
    instance: Any = None
    is_dead: bool = False
    why: str = "killed"
    calls: "dict[Call, None]" = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.options["name"])

    @property
    def restarts(self) -> bool:
        return bool(self.options.get("max_restarts"))

    def begin(self) -> None:
        if self.is_dead:
            return
        loop = self.ray.loop
        self.process = process = Process(loop, self.name, self.machine.name)
        process.on_death.append(lambda: self._died(process))
        self.ray.actor_of[process] = self
        self.ray.told("begin", self.name)
        process.call(self._construct)

    def _construct(self) -> None:
        self.instance = self.cls(*self.given)
        for call in [*self.calls]:
            call.arrive()

    def _died(self, process: Process) -> None:
        """Ray notices."""
        self.instance, is_gone = None, getattr(process, "is_gone", False)
        loop, after_s = self.ray.loop, LOST_S if is_gone else NOTICE_S
        self.ray.told("dead", self.name)
        if self.restarts:
            loop.call_later(after_s + START_S, self.begin, context=self.ray.context)
        else:
            loop.call_later(after_s, self.bury, context=self.ray.context)

    def bury(self) -> None:
        self.is_dead = True
        for call in [*self.calls]:
            call.fail(Died(f"{self.name}: the actor is dead: {self.why}"))

    def kill(self) -> None:
        """As ray.kill does it: a stopped process takes its raylet a while."""
        if self.process is None:
            self.is_dead = True
        elif self.process.is_alive:
            after_s = KILL_STOPPED_S if self.process.is_stopped else NOTICE_S
            self.ray.loop.call_later(after_s, self.process.kill, context=self.ray.context)
        if self.restarts:
            self.options["max_restarts"] = 0
            self.is_dead = True


@dataclass(eq=False)
class Call:
    """One, from a process that awaits ``answer``."""

    actor: Actor
    method: str
    given: tuple[Any, ...]
    caller: Process | None
    answer: "asyncio.Future[Any]"
    is_dropped: bool = False

    def send(self, after_s: float) -> None:
        self.actor.calls[self] = None
        ray = self.actor.ray
        ray.loop.call_later(after_s, self.arrive, context=ray.context)

    def arrive(self) -> None:
        """Once no cut is in the way."""
        actor, ray = self.actor, self.actor.ray
        if self._is_cut():
            ray.loop.call_later(CUT_S, self.arrive, context=ray.context)
        elif actor.is_dead:
            self.fail(Died(f"{actor.name}: the actor is dead: {actor.why}"))
        elif actor.instance is not None:
            assert actor.process is not None
            actor.process.call(self._run, actor.process)

    def _is_cut(self) -> bool:
        caller, process = self.caller, self.actor.process
        is_there = caller is not None and process is not None
        return is_there and self.actor.ray.net.is_cut(caller, process)  # type: ignore[arg-type]

    def _run(self, process: Process) -> None:
        process.start(self._answer())

    async def _answer(self) -> None:
        error: Exception | None = None
        result: Any = None
        try:
            result = getattr(self.actor.instance, self.method)(*self.given)
            if inspect.isawaitable(result):
                result = await result
        except Exception as raised:
            error = TaskFailed(f"{self.method}: {raised!r}")
        if self.is_dropped:
            error = Unavailable("the answer was lost")
        self.actor.calls.pop(self, None)
        self._tell(result, error)

    def fail(self, error: Exception) -> None:
        self.actor.calls.pop(self, None)
        self._tell(None, error)

    def _tell(self, result: Any, error: Exception | None) -> None:
        ray = self.actor.ray
        if self._is_cut():
            ray.loop.call_later(CUT_S, self._tell, result, error, context=ray.context)
        elif self.caller is not None:
            self.caller.call(self._resolve, result, error, after_s=ray.net.latency_s())

    def _resolve(self, result: Any, error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)
            self.answer.exception()  # nobody may ask for it


@dataclass(eq=False)
class Handle:
    actor: Actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self.actor.ray.call(self.actor, method, given))


@dataclass(eq=False)
class Trouble:
    """What happens to one call: nothing."""

    before_s: float = 0.0
    is_refused: bool = False
    is_unanswered: bool = False
    is_doubled: bool = False


class FakeRay:
    """Of one cluster. ``told`` hears of processes and calls; ``trouble`` decides about each."""

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
        """Whether what is asked of Ray itself raises now."""
        self.on_kill: Callable[[str], None] = lambda name: None
        """Is told who is killed that lives."""
        self.context = Process(loop, "ray").context
        self.util = SimpleNamespace(
            list_named_actors=self._named, placement_group_table=self._table
        )

    def _answers(self) -> None:
        if self.fails():
            raise RayError("the GCS does not answer")

    # What is asked of Ray itself.

    def get_actor(self, name: str, namespace: str = "") -> Handle:
        self._answers()
        actor = self.actors.get(name)
        if actor is None or actor.is_dead:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        return Handle(actor)

    def kill(self, handle: Handle) -> None:
        self._answers()
        process = handle.actor.process
        if process is not None and process.is_alive:
            self.on_kill(process.name)
        handle.actor.kill()

    def get_runtime_context(self) -> Any:
        process = PROCESS.get()
        assert process is not None
        return SimpleNamespace(current_actor=Handle(self.actor_of[process]))

    def remote(self, what: Any) -> Any:
        def options(**given: Any) -> Any:
            def make(*args: Any) -> Any:
                return self._make(what, args, given)

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def nodes(self) -> list[dict[str, Any]]:
        self._answers()
        return [
            {"NodeID": one.name, "NodeManagerAddress": one.address, "Alive": not one.is_known_lost}
            for one in self.machines
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(one.num_cpus for one in self.machines if not one.is_known_lost)}

    def available_resources(self) -> dict[str, float]:
        alive = [one for one in self.machines if not one.is_known_lost]
        return {"CPU": sum(one.num_cpus - one.used for one in alive)}

    def get(self, told: Callable[[], Any], timeout: float = 0.0) -> Any:
        """Of a task that ran elsewhere."""
        self.threads.sleep(self.draw.uniform(0.01, 0.3))
        return told()

    # Placement groups.

    def placement_group(self, bundles: Any, strategy: str, name: str, lifetime: str) -> Group:
        self._answers()
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
            machine.used -= bundle["CPU"]
        for actor in self.actors.values():
            if actor.options.get("group") is group and not actor.is_dead:
                actor.kill()

    def place(self, group: Group) -> bool:
        """On as few machines as may be."""
        if group.machines or group.is_removed:
            return bool(group.machines)
        want = sum(bundle["CPU"] for bundle in group.bundles)
        alive = [one for one in self.machines if not one.is_known_lost]
        for machine in alive:
            if machine.num_cpus - machine.used >= want:
                group.machines = [machine] * len(group.bundles)
                machine.used += want
                return True
        free = {one.name: one.num_cpus - one.used for one in alive}
        found = []
        for bundle in group.bundles:
            machine = next((m for m in alive if free[m.name] >= bundle["CPU"]), None)  # type: ignore[assignment]
            if machine is None:
                return False
            free[machine.name] -= bundle["CPU"]
            found.append(machine)
        group.machines = found
        for machine, bundle in zip(found, group.bundles, strict=True):
            machine.used += bundle["CPU"]
        return True

    def _table(self, group: Group | None = None) -> Any:
        self._answers()
        if group is not None:
            placed = enumerate(group.machines)
            return {"bundles_to_node_id": {i: machine.name for i, machine in placed}}
        return {name: {"name": name} for name in self.groups}

    def _named(self, all_namespaces: bool) -> list[dict[str, str]]:
        self._answers()
        alive = [actor for actor in self.actors.values() if not actor.is_dead]
        return [{"namespace": "tandem", "name": actor.name} for actor in alive]

    # Actors and their calls.

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
        if machine.is_alive:
            self.loop.call_later(
                self.draw.uniform(0.5, 1.5) * START_S, actor.begin, context=self.context
            )
        else:
            self.loop.call_later(LOST_S, actor.bury, context=self.context)
        return Handle(actor)

    def call(self, actor: Actor, method: str, given: tuple[Any, ...]) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = self.loop.create_future()
        caller, trouble = PROCESS.get(), self.trouble(actor, method)
        self.told(
            "call",
            caller and caller.name,
            actor.name,
            method,
            *given[1:2] if method == "call" else (),
        )
        call = Call(actor, method, given, caller, answer, trouble.is_unanswered)
        if trouble.is_refused:
            call.fail(Unavailable("the call was lost"))
            return answer
        call.send(self.net.latency_s() + trouble.before_s)
        if trouble.is_doubled:
            again: asyncio.Future[Any] = self.loop.create_future()
            Call(actor, method, given, None, again).send(self.net.latency_s() + 0.05)
        return answer

    # Machines.

    def lose(self, machine: Machine) -> None:
        """All at once, without a word."""
        machine.is_alive = False
        for actor in self.actors.values():
            if actor.machine is machine and actor.process is not None and actor.process.is_alive:
                actor.process.is_gone = True  # type: ignore[attr-defined]
                actor.process.kill()

        def known() -> None:
            machine.is_known_lost = True

        self.loop.call_later(LOST_S, known, context=self.context)

    def patched(self) -> list[Any]:
        """Patches of the modules that ask Ray."""
        from cluster.control import actors, controller, machines, members

        strategies = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, index: SimpleNamespace(
                group=group, index=index
            ),
            NodeAffinitySchedulingStrategy=lambda node, soft: None,
        )
        names = ("get_placement_group", "placement_group", "remove_placement_group")
        return [
            *(
                patch.object(module, "ray", self)
                for module in (actors, controller, machines, members)
            ),
            *(patch.object(machines, name, getattr(self, name)) for name in names),
            patch.object(machines, "scheduling", strategies),
        ]
