"""Ray's actors as simulated processes. Calls to them are messages that may be late or lost."""

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from tests.sim.loop import Process
from tests.sim.net import AGAIN_S

if TYPE_CHECKING:
    from tests.sim.fake_ray import FakeRay

START_S, NOTICE_S, LOST_S, KILL_STOPPED_S = 0.4, 0.05, 15.0, 5.0


class TaskFailed(RayError):
    """An actor's method raised."""


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
    is_draining: bool = False
    used: float = 0.0


@dataclass(eq=False)
class Actor:
    """A simulated actor. Its death fails the pending ``calls``; a restart repeats them."""

    ray: "FakeRay"
    cls: type
    given: tuple[Any, ...]
    options: dict[str, Any]
    machine: Machine
    process: Process | None = None
    instance: Any = None
    is_dead: bool = False
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
        self.process = process = Process(self.ray.loop, self.name, self.machine.name)
        process.on_death.append(lambda: self._died(process))
        self.ray.actor_of[process] = self
        self.ray.told("begin", self.name)
        process.call(self._construct)

    def _construct(self) -> None:
        """Run the actor's constructor. If it raises, Ray does not restart the actor."""
        try:
            self.instance = self.cls(*self.given)
        except RayError as error:
            assert self.process is not None
            self.ray.told("not constructed", self.name, error)
            self.options["max_restarts"] = 0
            return self.process.kill()
        for call in [*self.calls]:
            call.arrive()

    def _died(self, process: Process) -> None:
        """Let Ray notice the death of the actor's process."""
        self.instance = None
        after_s = LOST_S if process.is_gone else NOTICE_S
        self.ray.told("dead", self.name)
        if self.restarts:
            self.ray.later(after_s + START_S, self.begin)
        else:
            self.ray.later(after_s, self.bury)

    def bury(self) -> None:
        self.is_dead = True
        for call in [*self.calls]:
            call.fail(Died(f"{self.name}: the actor is dead"))

    def kill(self) -> None:
        """Kill the actor like ray.kill. If its process is stopped, that takes longer."""
        if self.process is None:
            self.is_dead = True
        elif self.process.is_alive:
            self.ray.on_kill(self.name)
            after_s = KILL_STOPPED_S if self.process.is_stopped else NOTICE_S
            self.ray.later(after_s, self.process.kill)
        if self.restarts:
            self.options["max_restarts"] = 0
            self.is_dead = True


@dataclass(eq=False)
class Call:
    """A call of a process that awaits ``answer``. If it ``is_dropped``, the answer is lost."""

    actor: Actor
    method: str
    given: tuple[Any, ...]
    caller: Process | None
    answer: "asyncio.Future[Any]"
    is_dropped: bool = False

    def send(self, after_s: float) -> None:
        self.actor.calls[self] = None
        self.actor.ray.later(after_s, self.arrive)

    def arrive(self) -> None:
        """Deliver the call once the two machines are not cut off from each other."""
        actor = self.actor
        if self._is_cut(self.caller, actor.process):
            actor.ray.later(AGAIN_S, self.arrive)
        elif actor.is_dead:
            self.fail(Died(f"{actor.name}: the actor is dead"))
        elif actor.instance is not None:
            assert actor.process is not None
            actor.process.call(self._run, actor.process)

    def fail(self, error: Exception) -> None:
        self.actor.calls.pop(self, None)
        self._tell(None, error)

    def _is_cut(self, sender: Process | None, receiver: Process | None) -> bool:
        if sender is None or receiver is None:
            return False
        return self.actor.ray.net.is_cut(sender, receiver)

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

    def _tell(self, result: Any, error: Exception | None) -> None:
        ray = self.actor.ray
        if self._is_cut(self.actor.process, self.caller):
            ray.later(AGAIN_S, self._tell, result, error)
        elif self.caller is not None:
            self.caller.call(self._resolve, result, error, after_s=ray.net.latency_s())

    def _resolve(self, result: Any, error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)
            self.answer.exception()  # marks it as retrieved, because the caller may be gone


@dataclass(eq=False)
class Handle:
    actor: Actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self.actor.ray.call(self.actor, method, given))
