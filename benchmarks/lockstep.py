"""Cost of lockstep between ranks: plan, dispatch and dummy passes of a step.

    python -m benchmarks.lockstep [--rows 8] [--steps 60] [--sizes 1,2,4]
    python -m benchmarks.lockstep --prefill [--tokens 512] [--steps 20] [--sizes 2,4]

Each gang has one process per rank, with gloo between them and without Ray. Rows of a decode gang
start with empty caches, which cost the same as real ones. A prefill gang computes one random prompt
a step, with each way of dispatch.

Each gang is measured with work on all ranks, and with work on rank 0 alone while the others run
dummies. Times are rank 0's, in ms per step. They are split into waiting for the plan, collectives
including waits for slower ranks, and the rest of the step.
"""

import argparse
import multiprocessing as mp
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tandem.core.config import TandemConfig, load
from tandem.core.identity import Identity
from tandem.core.info import DECODE, PREFILL
from tandem.core.membership import RankSpec, Rendezvous
from tandem.core.request import Request, SamplingParams
from tandem.decode_node.engine import DecodeEngine
from tandem.decode_node.planning.states import RequestSize
from tandem.kv_transfer.pages import PagePool
from tandem.prefill_node.engine import ChunkResult, PrefillEngine
from tandem.runtime.engine_loop import EngineLoop
from tandem.runtime.gang.collectives import Collectives
from tandem.runtime.gang.gang_lockstep import GangLockstep
from tandem.runtime.gang.planner_server import PlannerServer
from tandem.runtime.lockstep import Lockstep
from tandem.runtime.parts import RankParts, load_resident_model

LOOPBACK = "127.0.0.1"
NUM_WARM = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a step in ms, and its number of collectives."""

    step_ms: float
    plan_ms: float
    dispatch_ms: float
    num_collectives: float


class Timer:
    """Adds up the time spent in a method."""

    def __init__(self) -> None:
        self.seconds, self.num = 0.0, 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return method(*args, **named)
            finally:
                self.seconds += time.perf_counter() - began_at
                self.num += 1

        return timed


@dataclass(frozen=True, slots=True)
class Job:
    """``size`` ranks of ``kind``, all busy or rank 0 alone; ``num`` rows, or tokens of a prompt."""

    kind: str
    size: int
    dispatch: str
    is_all: bool
    num: int
    num_steps: int

    @property
    def config(self) -> TandemConfig:
        return load(
            None,
            [
                f"{self.kind}.dp_size={self.size}", f"{self.kind}.dispatch={self.dispatch}",
                "decode.max_num_seqs=64", f"prefill.max_num_batched_tokens={self.num}",
                "kv.num_pages=700", "kv.page_size=16", "speculation.draft_length=fixed",
            ],
        )  # fmt: skip


def run_rank(job: Job, rank: int, inbox: Connection, outbox: Connection) -> None:
    """Run one rank's process. Rank 0 sends the rendezvous and the cost of its steps."""
    torch.set_num_threads(1)
    spec, hub = RankSpec(f"{job.kind}-0", job.kind, 1, rank, job.size), None
    if job.size > 1 and rank == 0:
        hub = PlannerServer(job.size, LOOPBACK)
        outbox.send(hub.rendezvous)
    rendezvous: Rendezvous | None = inbox.recv() if job.size > 1 else None
    plans, calls = Timer(), Timer()
    with timed(plans, calls):
        engine, loop = start(spec, job.config, rendezvous, hub)
        if job.is_all or rank == 0:
            loop.post(partial(begin, engine, job)).result()
        marks = []
        for mark in (NUM_WARM, NUM_WARM + job.num_steps):
            while rank == 0 and engine.num_steps < mark:
                time.sleep(0.002)
            now = time.perf_counter(), plans.seconds, calls.seconds, calls.num
            marks.append((engine.num_steps, *now))
        if rank == 0:
            num, *rest = (after - before for before, after in zip(*marks, strict=True))
            step_s, plan_s, call_s, num_calls = (value / num for value in rest)
            outbox.send(Cost(step_s * 1e3, plan_s * 1e3, call_s * 1e3, num_calls))
        inbox.recv()
        loop.stop()


@contextmanager
def timed(plans: Timer, calls: Timer) -> Any:
    GangLockstep.plan = plans.around(GangLockstep.plan)  # type: ignore[method-assign]
    Collectives._call = calls.around(Collectives._call)  # type: ignore[method-assign]
    yield


def start(
    spec: RankSpec, config: TandemConfig, rendezvous: Rendezvous | None, hub: PlannerServer | None
) -> tuple[DecodeEngine | PrefillEngine, EngineLoop]:
    memory, loop = load_resident_model(spec, config), EngineLoop("engine")
    pool = PagePool(memory.num_pages, config.kv.page_size)
    lockstep = Lockstep()
    if rendezvous is not None:
        lockstep = GangLockstep(spec, rendezvous, hub, memory.loaded.device, loop.stall_detector)
    memory.loaded.dispatch.set_group(lockstep.collectives)
    parts = RankParts(spec, config, memory.loaded, pool, memory.caches, loop, lockstep)
    engine: DecodeEngine | PrefillEngine
    if spec.kind == DECODE:
        engine = DecodeEngine(parts, lambda updates: None, lambda identity: None)
    else:
        engine = PrefillEngine(parts, lambda done: drop(engine, done), lambda *failed: None)
    loop.add(engine)
    loop.on_end(lockstep.close)
    loop.start()
    return engine, loop


def drop(engine: DecodeEngine | PrefillEngine, done: ChunkResult) -> None:
    if done.first_token is not None:
        engine.scheduler.drop(done.sequence.identity)


def begin(engine: DecodeEngine | PrefillEngine, job: Job) -> None:
    """Give the engine enough work for all steps."""
    if isinstance(engine, PrefillEngine):
        choose = random.Random(1)
        for i in range(NUM_WARM + job.num_steps + 5):
            prompt = tuple(choose.randrange(2, 2000) for _ in range(job.num))
            request = Request(f"r{i}", prompt, sampling=SamplingParams(seed=0))
            engine.scheduler.admit(Identity(f"r{i}"), request)
        return
    sampling = SamplingParams(seed=0, max_tokens=1200, ignore_eos=True)
    for i in range(job.num):
        request = Request(f"r{i}", tuple(range(2, 66)), sampling=sampling)
        identity = Identity(request.request_id)
        engine.enqueue(identity, RequestSize(len(request.prompt_ids), 0, sampling.max_tokens))
        engine.activate(identity, request, 7, None)


def measure(job: Job) -> Cost:
    spawn = mp.get_context("spawn")
    ranks = []
    for rank in range(job.size):
        to_rank, inbox = spawn.Pipe()
        outbox, from_rank = spawn.Pipe()
        process = spawn.Process(target=run_rank, args=(job, rank, inbox, outbox), daemon=True)
        process.start()
        ranks.append((process, to_rank, from_rank))
    if job.size > 1:
        rendezvous = ranks[0][2].recv()
        for _, to_rank, _ in ranks:
            to_rank.send(rendezvous)
    cost: Cost = ranks[0][2].recv()
    for process, to_rank, _ in ranks:
        to_rank.send("stop")
        process.join(20)
    return cost


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    for size in map(int, args.sizes.split(",")):
        for is_all in (True, False) if size > 1 else (True,):
            if not args.prefill:
                yield Job(DECODE, size, "auto", is_all, args.rows, args.steps)
                continue
            for dispatch in ("all_gather", "all_to_all") if size > 1 else ("auto",):
                yield Job(PREFILL, size, dispatch, is_all, args.tokens, args.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="What lockstep costs a step.")
    parser.add_argument("--prefill", action="store_true", help="a prefill gang, not a decode gang")
    parser.add_argument("--rows", type=int, default=8, help="rows of a decode rank that is busy")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prefill step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sizes", default="1,2,4", help="ranks of the gangs")
    args = parser.parse_args()
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = (
        "ranks",
        "busy",
        "way",
        "step ms",
        "plan ms",
        "dispatch ms",
        "rest ms",
        "collectives",
    )
    for column in columns:
        table.add_column(column, justify="right")
    console = Console()
    with console.status("measuring") as shown:
        for job in jobs(args):
            busy = job.size if job.is_all else 1
            shown.update(f"measuring {job.size} ranks, {busy} of them busy")
            cost = measure(job)
            rest_ms = cost.step_ms - cost.plan_ms - cost.dispatch_ms
            times = (cost.step_ms, cost.plan_ms, cost.dispatch_ms, rest_ms)
            cells = [f"{value:.2f}" for value in times]
            name = str(job.size), str(busy), job.dispatch
            table.add_row(*name, *cells, f"{cost.num_collectives:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
