"""The simulated cluster (tests/sim): its event loop, clock and threads, and some seeds."""

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.mutants import ROOT, copy_tree
from tests.sim.loop import PROCESS, Deadlock, Process, SimLoop
from tests.sim.mix import EDGES
from tests.sim.net import Net
from tests.sim.once import ONCE
from tests.sim.plants import Plant, read, try_out
from tests.sim.threads import Threads

NUM_SEEDS, NUM_EDGES = 6, 2
PAGE = ROOT / "tests" / "sim" / "README.md"
ENDED = "the finally of a process that was killed"


def sim_loop() -> SimLoop:
    loop = SimLoop()
    loop.threads, loop.net = Threads(loop), Net(loop, random.Random(1))
    return loop


def run(loop: SimLoop, *works: tuple[Process, object]) -> None:
    """Run the processes until the last one ends."""
    tasks = [process.start(work) for process, work in works]
    with loop.threads.patched():
        try:
            loop.run_until_complete(tasks[-1])
        finally:
            loop.threads.end()


def test_time_passes_where_all_wait() -> None:
    loop = sim_loop()

    async def wait() -> None:
        await asyncio.sleep(3600)  # time: virtual

    run(loop, (Process(loop, "a"), wait()))
    assert loop.time() == pytest.approx(4600)


def test_the_killed_never_run_again_and_the_stopped_go_on() -> None:
    loop, told = sim_loop(), []
    killed, stopped, driver = (Process(loop, name) for name in ("killed", "stopped", "driver"))

    async def work(name: str) -> None:
        try:
            while True:
                await asyncio.sleep(1)  # time: virtual
                told.append((name, loop.time() - 1000))
        finally:
            told.append((name, ENDED))

    async def drive() -> None:
        await asyncio.sleep(2.5)  # time: virtual
        killed.kill()
        stopped.stop()
        await asyncio.sleep(5)  # time: virtual
        stopped.resume()
        await asyncio.sleep(1.2)  # time: virtual

    run(loop, (killed, work("k")), (stopped, work("s")), (driver, drive()))
    assert [at for name, at in told if name == "k"] == [1, 2]
    assert [at for name, at in told if name == "s"] == [1, 2, 7.5, 8.5]


def test_threads_block_in_virtual_time() -> None:
    """Conditions, futures and sleep block in virtual time. A process's threads end with it."""
    loop, told = sim_loop(), []
    process, other = Process(loop, "a"), Process(loop, "b")

    def block(name: str, future: "Future[int]") -> None:
        condition = threading.Condition()
        with condition:
            assert not condition.wait(2.0)  # time: virtual
        time.sleep(1.0)  # time: virtual
        told.append((name, future.result(9.0), time.monotonic() - 1000))  # time: virtual

    async def work(name: str, value: int) -> None:
        future: Future[int] = Future()
        threading.Thread(target=block, args=(name, future)).start()
        await asyncio.sleep(4.0)  # time: virtual
        future.set_result(value)
        await asyncio.to_thread(time.sleep, 2.0)

    async def kill() -> None:
        await asyncio.sleep(3.5)  # time: virtual
        other.kill()
        await asyncio.sleep(4.0)  # time: virtual

    run(loop, (process, work("a", 7)), (other, work("b", 8)), (Process(loop, "c"), kill()))
    assert told == [("a", 7, 4.0)]


def test_connections_end_with_their_process_and_wait_behind_a_cut() -> None:
    loop, told = sim_loop(), []
    server, client = Process(loop, "s", "m0"), Process(loop, "c", "m1")
    is_cut = False
    loop.net.is_cut = lambda a, b: is_cut and a.machine != b.machine

    async def serve() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(9):
                writer.write(data.upper())

        await asyncio.start_server(answer, "h", 5)
        await asyncio.sleep(100)  # time: virtual

    async def ask() -> None:
        nonlocal is_cut
        reader, writer = await asyncio.open_connection("h", 5)
        for word in (b"one", b"two"):
            writer.write(word)
            told.append((await reader.read(9), round(loop.time() - 1000)))
            is_cut = not is_cut
            loop.call_later(7, heal)
        server.kill()
        told.append((await reader.read(9), round(loop.time() - 1000)))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("h", 5)

    def heal() -> None:
        nonlocal is_cut
        is_cut = False
        loop.net.heal()

    run(loop, (server, serve()), (client, ask()))
    assert told == [(b"ONE", 0), (b"TWO", 7), (b"", 14)]


def test_nothing_to_do_is_told() -> None:
    loop = sim_loop()

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(loop, (Process(loop, "a"), wait()))
    assert PROCESS.get() is None


def test_nothing_is_lost() -> None:
    """Runs in a separate process, so that other tests' threads take no time from it. ``make soak``
    runs thousands of seeds."""
    told = sim("--seeds", str(NUM_SEEDS), "--jobs", "1")
    assert f"{NUM_SEEDS} seeds, 0 with failures" in told


def test_nothing_is_lost_at_the_edges() -> None:
    """No request is lost in seeds with full gateways, every option, an operator and hostile
    clients."""
    told = sim("--first", str(EDGES), "--seeds", str(NUM_EDGES), "--jobs", "1")
    assert f"{NUM_EDGES} seeds, 0 with failures" in told


def test_what_once_failed() -> None:
    """Replay all recorded failures with each of their faults."""
    told = sim("--once")
    done = re.findall(r"(\d+) of (\d+) faults: (.*)", told)
    assert [what for _, _, what in done] == [*ONCE], told
    assert all(num == most for num, most, _ in done), told


@pytest.mark.slow
@pytest.mark.parametrize("first", [11_001, 21_001])
def test_nothing_is_lost_in_more(first: int) -> None:
    assert "500 seeds, 0 with failures" in sim("--first", str(first), "--seeds", "500")


@pytest.mark.parametrize("plant", read(), ids=lambda plant: plant.name)
def test_each_mistake_can_be_put_back(plant: Plant) -> None:
    """Each recorded mistake can be planted again, and the page names the seed that finds it."""
    assert plant.changed(ROOT)
    rows = [line for line in PAGE.read_text().splitlines() if f"`{plant.name}`" in line]
    assert [line.split(" | ")[-1].strip(" |") for line in rows] == [f"{plant.seed:,}"]


@pytest.mark.slow
def test_each_mistake_that_is_put_back_is_found(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    missed = [one.name for one in read() if not try_out(one, tmp_path, "--seed", str(one.seed))]
    assert not missed


@pytest.mark.parametrize(
    "seeds", [("20003",), pytest.param(("7", "10007", "20004", "20006"), marks=pytest.mark.slow)]
)
def test_a_seed_decides_everything(seeds: tuple[str, ...]) -> None:
    """The hash of all events is equal in two processes with different string hashes."""
    traces = {
        tuple(re.findall("^seed .*", sim("--seed", *seeds, hashes=hashes), re.MULTILINE))
        for hashes in ("1", "2")
    }
    [told] = traces
    assert all(
        line.startswith(f"seed {seed}, trace") for seed, line in zip(seeds, told, strict=True)
    )


def sim(*asked: str, hashes: str = "random") -> str:
    """Run ``python -m tests.sim`` and return its output."""
    command = [sys.executable, "-m", "tests.sim", *asked]
    environment = os.environ | {"PYTHONHASHSEED": hashes}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
