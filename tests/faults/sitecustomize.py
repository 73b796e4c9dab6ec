"""Inject faults from inside the processes of a cluster under test.

Python imports this module first in every process that has its folder on the path. In a rank, files
in $FAULTS named ``<pid>.engine`` and ``<pid>.loop`` block the engine thread or the asyncio loop as
long as they exist. A decode step reads unmapped memory if it has a POISON prompt that has emitted
NUM_TOLD tokens. A prefill step of PREFILL_POISON does the same.
"""

import asyncio
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

POISON = (0, 77, 78, 79, 77, 78)
PREFILL_POISON = (0, 87, 88, 89, 87, 88)
NUM_TOLD = 12


def _poison_steps(launcher: Any) -> None:
    launch = launcher.Launcher.launch

    def poisonable(self: Any, step: Any) -> Any:
        for one in step.sequences:
            if one.request.prompt_ids[: len(POISON)] == POISON and one.num_output >= NUM_TOLD:
                ctypes.string_at(0)
        return launch(self, step)

    launcher.Launcher.launch = poisonable


def _poison_prefill(engine: Any) -> None:
    compute = engine.PrefillEngine._compute

    def poisonable(self: Any, work: Any) -> Any:
        for chunk in self._chunks:
            if chunk.sequence.token_ids[: len(PREFILL_POISON)] == PREFILL_POISON:
                ctypes.string_at(0)
        return compute(self, work)

    engine.PrefillEngine._compute = poisonable


def _end_in_lockstep(collectives: Any) -> None:
    """Signal a rank at a collective. If its file ``PID.gang`` contains "SIGNAL NUMBER", the rank
    gets that signal when it enters collective NUMBER of its next step; 0 is the proposal."""
    call, begin = collectives.Collectives._call, collectives.Collectives.start_step

    def meet(number: int) -> None:
        path = Path(os.environ["FAULTS"], f"{os.getpid()}.gang")
        if path.exists():
            signal_number, at = map(int, path.read_text().split())
            if at == number:
                path.unlink()
                os.kill(os.getpid(), signal_number)

    def calling(self: Any, *args: Any, **named: Any) -> None:
        meet(self.position.number + 1)
        call(self, *args, **named)

    def beginning(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        meet(0)

    collectives.Collectives._call, collectives.Collectives.start_step = calling, beginning


def _tell_who(gang_lockstep: Any) -> None:
    """Record the process of each rank of a gang in ``SEAT.pid``, and every joined epoch in
    ``lives``."""
    inner = gang_lockstep.GangLockstep.__init__

    def joining(self: Any, spec: Any, *args: Any, **named: Any) -> None:
        _stop("joining")
        Path(os.environ["FAULTS"], f"{spec.rank_name}.pid").write_text(str(os.getpid()))
        with Path(os.environ["FAULTS"], "lives").open("a") as file:
            file.write(f"{spec.epoch_name}\n")
        inner(self, spec, *args, **named)

    gang_lockstep.GangLockstep.__init__ = joining


def _block_on_demand(engine_loop: Any) -> None:
    begin = engine_loop.EngineLoop.__init__

    def watched(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        loop = asyncio.get_running_loop()
        threading.Thread(target=_watch, args=(self.post, loop), daemon=True).start()

    engine_loop.EngineLoop.__init__ = watched


def _watch(post: Callable[[Callable[[], None]], object], loop: asyncio.AbstractEventLoop) -> None:
    def blocked_by(path: Path) -> Callable[[], None]:
        def block() -> None:
            while path.exists():
                time.sleep(0.02)  # time: between two looks

        return block

    ways = {"engine": post, "loop": loop.call_soon_threadsafe}
    while True:
        for name, way in ways.items():
            path = Path(os.environ["FAULTS"], f"{os.getpid()}.{name}")
            if path.exists():
                way(blocked_by(path))
                while path.exists():
                    time.sleep(0.02)  # time: between two looks
        time.sleep(0.02)  # time: between two looks


def _stop(phase: str) -> None:
    """Stop the first process that gets here while a file ``PHASE.stop`` exists."""
    with suppress(FileNotFoundError):
        Path(os.environ["FAULTS"], f"{phase}.stop").unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


def _stop_as_it_loads(files: Any) -> None:
    read = files.CheckpointFiles.read

    def reading(self: Any, name: str) -> Any:
        _stop("loading")
        return read(self, name)

    files.CheckpointFiles.read = reading


def _stop_as_it_compiles(build: Any) -> None:
    """Stop the process while its compiler runs."""
    computed_s = build._cpu_s

    def computed(pid: int) -> float:
        _stop("compiling")
        return float(computed_s(pid))

    build._cpu_s = computed


MESSAGE_S = 2.0
LATE_S = 3.0


class Messages:
    """Decides when the next message of this process meets a fault."""

    def __init__(self) -> None:
        self._draw = random.Random(os.getpid())
        self._next_at = time.monotonic() + MESSAGE_S

    def drawn(self, *kinds: str) -> str:
        """Return the kind of fault for this message; "" for none."""
        if time.monotonic() < self._next_at:
            return ""
        self._next_at = time.monotonic() + self._draw.uniform(0.5, 1.5) * MESSAGE_S
        kind = self._draw.choice(kinds)
        with Path(os.environ["FAULTS"], f"{os.getpid()}.messages").open("a") as file:
            file.write(f"{kind}\n")
        return kind


def _lose_calls(actors: Any) -> None:
    call, messages = actors.RayControl.call, Messages()

    async def troubled(self: Any, method: str, payload: bytes) -> bytes:
        kind = messages.drawn("call-lost", "answer-lost", "call-late", "answer-late", "call-twice")
        if kind == "call-late":
            await asyncio.sleep(LATE_S)  # time: the fault itself
        if kind != "call-lost":
            calls = [call(self, method, payload) for _ in range(1 + (kind == "call-twice"))]
            first, *_ = await asyncio.gather(*calls, return_exceptions=True)
        if kind == "answer-late":
            await asyncio.sleep(LATE_S)  # time: the fault itself
        if kind in ("call-lost", "answer-lost"):
            raise actors.RankLost(f"{method}: {kind}")
        if isinstance(first, BaseException):
            raise first
        return first

    actors.RayControl.call = troubled


def _trouble_pulls(calls: Any) -> None:
    call, messages = calls.CallClient.call, Messages()

    async def troubled(self: Any, method: str, payload: bytes) -> bytes:
        kind = messages.drawn("pulls-broken", "pulls-call-late", "pulls-answer-late")
        if kind == "pulls-broken" and self._writer is not None:
            self._writer.transport.abort()
        if kind == "pulls-call-late":
            await asyncio.sleep(LATE_S)  # time: the fault itself
        answer: bytes = await call(self, method, payload)
        if kind == "pulls-answer-late":
            await asyncio.sleep(LATE_S)  # time: the fault itself
        return answer

    calls.CallClient.call = troubled


def _break_frames(frames: Any) -> None:
    inner, messages = frames.FrameStream.frames, Messages()

    async def breaking(self: Any) -> Any:
        async for frame in inner(self):
            kind = messages.drawn("frames-broken", "frames-late")
            if kind == "frames-broken":
                self.writer.transport.abort()
            elif kind:
                await asyncio.sleep(LATE_S / 3)  # time: the fault itself
            yield frame

    frames.FrameStream.frames = breaking


def _watch_controllers(controller: Any) -> None:
    from tests.faults import phases

    phases.watched(controller)


def _note_attempts(flow: Any) -> None:
    from tests.faults import timeline

    timeline.note_attempts(flow)


def _note_routing(gateway: Any) -> None:
    from tests.faults import timeline

    timeline.note_routing(gateway)


PATCHES = {
    "tandem.decode_node.program.launcher": _poison_steps,
    "tandem.model.checkpoint.files": _stop_as_it_loads,
    "tandem.model.kernels.build": _stop_as_it_compiles,
    "tandem.prefill_node.engine": _poison_prefill,
    "tandem.runtime.engine_loop": _block_on_demand,
    "tandem.runtime.gang.collectives": _end_in_lockstep,
    "tandem.runtime.gang.gang_lockstep": _tell_who,
}


class _Patcher(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            PATCHES[name](module)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


CHAOS_PATCHES = {
    "tandem.cluster.control.actors": _lose_calls,
    "tandem.cluster.control.controller": _watch_controllers,
    "tandem.cluster.gateway.flow": _note_attempts,
    "tandem.cluster.gateway.gateway": _note_routing,
    "tandem.runtime.frames": _break_frames,
    "tandem.net.calls": _trouble_pulls,
}


if "CHAOS" in os.environ:
    PATCHES |= CHAOS_PATCHES
if "FAULTS" in os.environ:
    sys.meta_path.insert(0, _Patcher())
