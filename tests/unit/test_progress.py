"""A slow rank is distinguished from a stalled one. A failed step ends only the sequences in it, and
the journal of a dead rank names them."""

import asyncio
import faulthandler
import mmap
import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.cluster.gateway.checks import request_id
from tandem.core.errors import RankLost
from tandem.core.identity import Identity
from tandem.core.membership import InFlightBatch, RankSpec
from tandem.core.schema import pack
from tandem.runtime.crash_journal import MAX_RECORDED, CrashJournal, read_crash_journal
from tandem.runtime.engine_loop import MAX_FAILED_STEPS, EngineLoop
from tandem.runtime.rank_actor import RankActor
from tandem.runtime.stall_detector import NUM_RECENT_TURNS, StallDetector, read_cpu_wait_s
from tests.waiting import PATIENCE_S, until

LEAST_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def turn(watch: StallDetector, clock: Clock, seconds: float) -> None:
    """Run one turn and measure its progress after every second."""
    watch.start_turn()
    for _ in range(int(seconds)):
        clock.now += 1
        watch.measure_progress()
    clock.now += seconds % 1
    watch.end_turn()


def test_a_turn_is_stuck_only_beyond_the_bound_that_long_turns_raise() -> None:
    clock = Clock()
    watch = StallDetector(LEAST_S, clock)
    assert (watch.measure_progress().busy_s, watch.measure_progress().stall_threshold_s) == (
        0.0,
        LEAST_S,
    )
    watch.start_turn()
    for second in range(1, 12):
        clock.now += 1
        progress = watch.measure_progress()
        assert progress.busy_s == second and progress.is_stalled == (second > LEAST_S)
    watch.end_turn()
    assert (
        watch.measure_progress().num_turns == 1
        and watch.measure_progress().stall_threshold_s == 110.0
    )
    turn(watch, clock, 60.0)
    assert (
        watch.measure_progress().stall_threshold_s == 600.0
        and not watch.measure_progress().is_stalled
    )
    for _ in range(NUM_RECENT_TURNS):
        turn(watch, clock, 0.01)
    assert watch.measure_progress().stall_threshold_s == LEAST_S, "a long turn counts for a while"


def test_a_process_that_stood_still_is_not_stuck_when_it_goes_on() -> None:
    clock = Clock()
    watch = StallDetector(LEAST_S, clock)
    watch.start_turn()
    clock.now += 1
    watch.measure_progress()
    clock.now += 500
    assert watch.measure_progress().busy_s == 2.5 and not watch.measure_progress().is_stalled
    watch.end_turn()
    assert watch.measure_progress().stall_threshold_s <= 50, (
        "nor does it make later turns look short"
    )


def test_a_turn_does_not_age_while_its_thread_waits_for_a_cpu() -> None:
    clock, starved = Clock(), Clock()
    watch = StallDetector(LEAST_S, clock)
    watch.attach_to_thread(starved)
    watch.start_turn()
    for second in range(1, 31):
        clock.now += 1
        starved.now += 0.75
        assert watch.measure_progress().busy_s == second / 4
    for _ in range(4):
        clock.now += 1
        starved.now += 3.0
        watch.measure_progress()
    assert watch.measure_progress().busy_s == 7.5 and not watch.measure_progress().is_stalled


def test_the_kernel_tells_who_waits_for_a_cpu() -> None:
    thread_id = threading.get_native_id()
    before = read_cpu_wait_s(thread_id)
    assert 0 <= before <= read_cpu_wait_s(thread_id)
    assert read_cpu_wait_s(2**30) == 0.0, "no such thread"


class Engine:
    """Runs the next item of ``work`` in each step until none is left."""

    def __init__(self, *work: Callable[[], None]) -> None:
        self.work = list(work)
        self.failed: list[Exception] = []

    def has_work(self) -> bool:
        return bool(self.work)

    def step(self) -> None:
        self.work.pop(0)()

    def fail(self, error: Exception) -> None:
        self.failed.append(error)

    def close(self) -> None:
        return


def error(kind: type[Exception], text: str = "bad") -> Callable[[], None]:
    def work() -> None:
        raise kind(text)

    return work


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop("test")
    yield loop
    loop.stop()


def run(loop: EngineLoop, engine: Engine) -> None:
    loop.add(engine)
    loop.start()
    while engine.work and loop.failure is None:
        loop.post(lambda: None).exception(PATIENCE_S)


async def test_a_step_that_raises_fails_what_was_in_it_and_the_engine_goes_on(
    loop: EngineLoop,
) -> None:
    done: list[int] = []
    odd = [error(RuntimeError, "out of memory"), lambda: done.append(1)] * 20
    engine = Engine(*odd, error(MemoryError), *odd)
    await asyncio.to_thread(run, loop, engine)
    assert loop.failure is None and await loop.call(lambda: 7) == 7
    assert len(done) == 40 and len(engine.failed) == 41


@pytest.mark.parametrize("fatal", [error(AssertionError), error(RuntimeError, "CUDA error: bad")])
async def test_what_leaves_the_state_in_doubt_ends_the_engine(
    loop: EngineLoop, fatal: Callable[[], None]
) -> None:
    engine = Engine(fatal, lambda: None)
    await asyncio.to_thread(run, loop, engine)
    assert loop.failure is not None and not engine.failed and len(engine.work) == 1
    with pytest.raises(RankLost):
        await loop.call(lambda: 7)


async def test_an_engine_that_only_fails_is_given_up(loop: EngineLoop) -> None:
    engine = Engine(*[error(RuntimeError)] * 20)
    await asyncio.to_thread(run, loop, engine)
    assert isinstance(loop.failure, RuntimeError) and len(engine.failed) == MAX_FAILED_STEPS


async def test_the_pace_tells_a_turn_that_does_not_end(loop: EngineLoop) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        go_on.wait(30)

    loop.add(Engine(hang))
    loop.start()
    await asyncio.to_thread(entered.wait, 30)
    before = loop.stall_detector.measure_progress()
    await until(lambda: loop.stall_detector.measure_progress().busy_s > before.busy_s)
    now = loop.stall_detector.measure_progress()
    go_on.set()
    assert now.num_turns == before.num_turns
    await until(lambda: not loop.stall_detector.measure_progress().busy_s)
    assert loop.stall_detector.measure_progress().num_turns > now.num_turns


A, B, C = Identity("a", 0, 1), Identity("b", 1, 2), Identity("c", 0, 3)


def test_the_box_holds_whoever_may_be_to_blame(tmp_path: Path) -> None:
    path = str(tmp_path / "rank.journal")
    journal = CrashJournal(path)
    assert read_crash_journal(path) is None
    journal.record_in_flight("decode", [A, B])
    assert read_crash_journal(path) == InFlightBatch((A, B), False)
    journal.record_in_flight("prefill", [C], is_isolated=True)
    assert read_crash_journal(path) == InFlightBatch((A, B, C), False), (
        "nobody is alone beside others"
    )
    journal.record_in_flight("decode", [])
    assert read_crash_journal(path) == InFlightBatch((C,), True)
    journal.record_in_flight("prefill", [])
    assert read_crash_journal(path) is None
    journal.record_in_flight("prefill", [C], is_isolated=True)
    assert read_crash_journal(path) == InFlightBatch((C,), True), "the same rows once more"
    journal.close()
    assert read_crash_journal(path) is None and not (tmp_path / "rank.journal").exists()


def test_a_box_takes_no_file_of_anothers_and_is_none_of_anothers(tmp_path: Path) -> None:
    path, victim = tmp_path / "rank.journal", tmp_path / "victim"
    victim.write_text("not ours to write to")
    path.symlink_to(victim)
    journal = CrashJournal(str(path))
    journal.record_in_flight("decode", [A])
    assert victim.read_text() == "not ours to write to"
    status = path.lstat()
    assert (stat.S_ISREG(status.st_mode), status.st_mode & 0o777) == (True, 0o600)
    assert status.st_blocks * 512 >= status.st_size == 1 << 20, "it has its room on the disk"
    path.chmod(0o666)
    assert read_crash_journal(str(path)) is None, "another may have written it"
    path.chmod(0o600)
    path.rename(tmp_path / "away")
    path.symlink_to(tmp_path / "away")
    assert read_crash_journal(str(path)) is None
    assert read_crash_journal(str(tmp_path / "away")) == InFlightBatch((A,), False)
    if os.geteuid() == 0:
        os.chown(tmp_path / "away", 4242424, -1)
        assert read_crash_journal(str(tmp_path / "away")) is None


def test_a_later_life_of_a_process_begins_its_box_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "rank.journal")
    CrashJournal(path).record_in_flight("decode", [A])
    again = CrashJournal(path)
    assert read_crash_journal(path) is None
    again.record_in_flight("decode", [B])
    assert read_crash_journal(path) == InFlightBatch((B,), False)


def test_a_box_has_its_room_on_the_disk_from_the_start(tmp_path: Path) -> None:
    """The journal's disk blocks are reserved at the start. Writing to a mapped file on a full disk
    would raise a signal."""
    path = tmp_path / "rank.journal"
    CrashJournal(str(path))
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size > 0  # POSIX counts blocks of 512 bytes


def test_no_step_is_too_large_for_a_box(tmp_path: Path) -> None:
    """The journal truncates a step with too many sequences, also with the longest ids that requests
    may have."""
    name = request_id("\U00020000" * 128)
    path = str(tmp_path / "rank.journal")
    everyone = [Identity(name, 0, (1 << 53) - i) for i in range(1, 3000)]
    CrashJournal(path).record_in_flight("prefill", everyone)
    assert read_crash_journal(path) == InFlightBatch(tuple(everyone[:MAX_RECORDED]), False)


def test_a_rank_keeps_its_box_where_none_can_foresee_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # pytest has it on
    spec = pack(RankSpec("prefill-0", "prefill", epoch=1))
    first, second = (RankActor(spec, "")._state.crash_journal_path for _ in range(2))
    assert first != second and all("prefill-0" in path for path in (first, second))


class Torn:
    """A mapped file whose process dies after writing half of the sequences of a step."""

    def __init__(self, target: mmap.mmap) -> None:
        self._target = target

    def __setitem__(self, where: slice, data: bytes) -> None:
        if where.start is None:
            self._target[where] = data
            return
        self._target[where.start : where.start + len(data) // 2] = data[: len(data) // 2]
        os.kill(os.getpid(), signal.SIGKILL)


def _die(path: str, is_writing: bool) -> None:
    journal = CrashJournal(path)
    journal.record_in_flight("decode", [A, B])
    if is_writing:
        journal._map = Torn(journal._map)  # type: ignore[assignment, arg-type]
        journal.record_in_flight("decode", [C, A, B])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_writing", [False, True])
def test_the_box_outlives_its_process_whole_or_empty(tmp_path: Path, is_writing: bool) -> None:
    path = str(tmp_path / "rank.journal")
    process = multiprocessing.get_context("spawn").Process(target=_die, args=(path, is_writing))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert read_crash_journal(path) == (None if is_writing else InFlightBatch((A, B), False))
