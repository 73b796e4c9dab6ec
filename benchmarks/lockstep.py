"""What it costs that ranks decode in lockstep: plan, dispatch and dummy passes of a step.

    python -m benchmarks.lockstep [--rows 8] [--steps 60] [--sizes 1,2,4]

A decode gang of each size, one process per rank, gloo between them, no Ray and no prefill: rows
begin with empty caches, which costs the same. Once all ranks have rows, once rank 0 alone while
the others run dummies. Times are rank 0's, in ms per step: waiting for the plan, inside
collectives (waiting for slower ranks included), and all the rest of the step.
"""

import argparse
import multiprocessing as mp
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from core.config import TandemConfig, load
from core.identity import Identity
from core.info import DECODE
from core.membership import Meeting, RankSpec
from core.request import Request, SamplingParams
from decode_node.engine import DecodeEngine
from decode_node.messages import Size
from kv_transfer.pages import PagePool
from runtime.engine_loop import EngineLoop
from runtime.gang.collectives import Collectives
from runtime.gang.hub import Hub
from runtime.gang.join import join
from runtime.gang.member import Member
from runtime.lockstep import Alone, Lockstep
from runtime.parts import RankParts, load_memory

LOOPBACK = "127.0.0.1"
NUM_WARM = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step, in ms; ``num_collectives`` it took."""

    step_ms: float
    plan_ms: float
    dispatch_ms: float
    num_collectives: float


class Timer:
    """Adds up what a method takes."""

    def __init__(self) -> None:
        self.seconds, self.num = 0.0, 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - began_at
                self.num += 1

        return timed


def run_rank(
    rank: int, size: int, num_rows: int, num_steps: int, inbox: Connection, outbox: Connection
) -> None:
    """One rank's process. Rank 0 sends the meeting, and what its steps cost."""
    config = load(
        None,
        [
            f"decode.dp_size={size}", "decode.max_rows=64", "kv.num_pages=700",
            "kv.page_size=16", "speculation.draft_length=fixed",
        ],
    )  # fmt: skip
    torch.set_num_threads(1)
    spec, hub = RankSpec("decode-0", DECODE, 1, rank, size), None
    if size > 1 and rank == 0:
        hub = Hub(size, LOOPBACK)
        outbox.send(hub.meeting)
    meeting: Meeting | None = inbox.recv() if size > 1 else None
    plans, calls = Timer(), Timer()
    with timed(plans, calls):
        engine, loop = start(spec, config, meeting, hub)
        identities = [Identity(f"r{i}") for i in range(num_rows)]
        for identity in identities:
            loop.post(partial(begin, engine, identity)).result()
        marks = []
        for mark in (NUM_WARM, NUM_WARM + num_steps):
            while rank == 0 and engine.num_steps < mark:
                time.sleep(0.005)
            now = engine.num_steps, engine.step_s, plans.seconds, calls.seconds, calls.num
            marks.append(now)
        if rank == 0:
            num, *rest = (after - before for before, after in zip(*marks, strict=True))
            step_s, plan_s, call_s, num_calls = (value / num for value in rest)
            outbox.send(Cost(step_s * 1e3, plan_s * 1e3, call_s * 1e3, num_calls))
        inbox.recv()
        loop.stop()


@contextmanager
def timed(plans: Timer, calls: Timer) -> Any:
    Member.plan = plans.around(Member.plan)  # type: ignore[method-assign]
    Collectives._call = calls.around(Collectives._call)  # type: ignore[method-assign]
    yield


def start(
    spec: RankSpec, config: TandemConfig, meeting: Meeting | None, hub: Hub | None
) -> tuple[DecodeEngine, EngineLoop]:
    memory, loop = load_memory(spec, config), EngineLoop("engine")
    pool = PagePool(memory.num_pages, config.kv.page_size)
    lockstep: Lockstep = Alone()
    if meeting is not None:
        lockstep = join(spec, meeting, hub, memory.loaded.device, loop.watch)
    memory.loaded.dispatch.join(lockstep.collectives)
    parts = RankParts(spec, config, memory.loaded, pool, memory.caches, loop, lockstep)
    engine = DecodeEngine(parts, lambda updates: None, lambda identity: None)
    loop.add(engine)
    loop.on_end(lockstep.close)
    loop.start()
    return engine, loop


def begin(engine: DecodeEngine, identity: Identity) -> None:
    sampling = SamplingParams(seed=0, max_tokens=1200, ignore_eos=True)
    request = Request(identity.request_id, tuple(range(2, 66)), sampling=sampling)
    engine.ask(identity, Size(len(request.prompt_ids), 0, sampling.max_tokens))
    engine.scheduler.begin(identity, request)
    engine.activate(identity, 7, None)


def measure(size: int, is_all: bool, num_rows: int, num_steps: int) -> Cost:
    spawn = mp.get_context("spawn")
    ranks = []
    for rank in range(size):
        to_rank, inbox = spawn.Pipe()
        outbox, from_rank = spawn.Pipe()
        rows = num_rows if is_all or rank == 0 else 0
        process = spawn.Process(
            target=run_rank, args=(rank, size, rows, num_steps, inbox, outbox), daemon=True
        )
        process.start()
        ranks.append((process, to_rank, from_rank))
    if size > 1:
        meeting = ranks[0][2].recv()
        for _, to_rank, _ in ranks:
            to_rank.send(meeting)
    cost: Cost = ranks[0][2].recv()
    for process, to_rank, _ in ranks:
        to_rank.send("stop")
        process.join(20)
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description="What lockstep costs a decode step.")
    parser.add_argument("--rows", type=int, default=8, help="rows of a rank that is busy")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sizes", default="1,2,4", help="ranks of the gangs")
    args = parser.parse_args()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("ranks", "busy", "step ms", "plan ms", "dispatch ms", "rest ms", "collectives"):
        table.add_column(column, justify="right")
    console = Console()
    with console.status("measuring") as shown:
        for size in map(int, args.sizes.split(",")):
            for is_all in (True, False) if size > 1 else (True,):
                busy = size if is_all else 1
                shown.update(f"measuring {size} ranks, {busy} of them busy")
                cost = measure(size, is_all, args.rows, args.steps)
                rest_ms = cost.step_ms - cost.plan_ms - cost.dispatch_ms
                times = (cost.step_ms, cost.plan_ms, cost.dispatch_ms, rest_ms)
                cells = [f"{value:.2f}" for value in times]
                table.add_row(str(size), str(busy), *cells, f"{cost.num_collectives:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
