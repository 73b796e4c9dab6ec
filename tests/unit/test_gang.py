"""A gang from epoch to epoch, over scripted ranks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cluster.control import gang_supervisor as gang_module
from tandem.cluster.control import restart_policy
from tandem.cluster.control.failure import CrashReport
from tandem.cluster.control.gang_supervisor import GangSupervisor
from tandem.cluster.control.plan import EpochLaunch, GangPlan, plan_gangs
from tandem.core.config import TandemConfig, load
from tandem.core.errors import Overloaded, RankLost, StepFailed
from tandem.core.identity import Identity
from tandem.core.info import ModelInfo
from tandem.core.membership import (
    DOWN,
    LOST,
    READY,
    STARTING,
    EpochEnd,
    Gang,
    InFlightBatch,
    RankInfo,
    RankSpec,
    RankState,
)
from tandem.core.progress import LOADING, EngineProgress
from tandem.core.schema import Failure
from tests.waiting import PATIENCE_S, for_ever, until

MODEL = ModelInfo("tiny", "deepseek_v3", 9, 9, (1,), 3, True, "float32")


class FakeRank:
    def __init__(self, spec: RankSpec, log_path: str = "") -> None:
        self.state = RankState(spec, "{}", 1, log_path, (0, 0))
        self.told = (0, 0)
        self.death: Exception | None = None
        self.num_asked = 0
        self.is_frozen = self.is_killed = self.is_stopped = False

    async def get_state(self, incarnation: int, epoch: int, weights: str | None) -> RankState:
        self.told = incarnation, epoch
        self.num_asked += 1
        if self.is_frozen:
            await for_ever()
        if self.death is not None:
            raise self.death
        return self.state

    async def stop(self) -> None:
        if self.is_frozen:
            await for_ever()
        self.is_stopped = True

    def kill(self) -> None:
        self.is_killed = True

    async def asked(self, num: int) -> None:
        """Wait until the rank was polled ``num`` more times."""
        last = self.num_asked + num
        await until(lambda: self.num_asked >= last)

    def become(self, progress: float = 1.0) -> None:
        """Set the share that is loaded; 1.0 means ready."""
        spec, path = self.state.spec, self.state.log_path
        info = RankInfo(spec, ("f",), "none", MODEL, 9, 9) if progress == 1.0 else None
        said = {"progress": progress, "info": info, "activity": LOADING}
        self.state = RankState(spec, "{}", 1, path, (0, 0), **said)


class FakeMachines:
    """``on_launch`` configures each new rank; ``lives`` holds them by epoch."""

    def __init__(self, on_launch: Callable[[FakeRank], None] = lambda rank: None) -> None:
        self.lives: dict[int, FakeRank] = {}
        self.cleared: list[str] = []
        self.clear_error: Exception | None = None
        self.refusal: Exception | None = None
        self.log_path = ""
        self.in_step: InFlightBatch | None = None
        self.seen = (7, 100)
        self._on_launch = on_launch

    def next_epoch(self) -> int:
        self.seen = self.seen[0], self.seen[1] + 1
        return self.seen[1]

    async def launch_ranks(
        self, plan: GangPlan, launch: EpochLaunch, config: TandemConfig, ranks: dict[int, FakeRank]
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert launch.placement_group_epoch == launch.epoch and launch.missing == [0]
        [spec] = plan.specs(launch.epoch, ["127.0.0.1"])
        self.lives[launch.epoch] = rank = FakeRank(spec, self.log_path)
        self._on_launch(rank)
        ranks[0] = rank

    async def read_crash_report(self, state: RankState) -> CrashReport:
        assert self.lives[state.spec.epoch].is_killed, "it may still write"
        path = Path(state.log_path)
        return CrashReport(path.read_text() if path.is_file() else "", self.in_step)

    async def release_placement_group(self, gang: str) -> None:
        if self.clear_error is not None:
            raise self.clear_error
        self.cleared.append(gang)


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "STARTING_POLL_S"):
        monkeypatch.setattr(gang_module, name, 0.005)
    monkeypatch.setattr(restart_policy, "PAUSE_S", 0.005)


@asynccontextmanager
async def kept(
    machines: FakeMachines, *sets: str
) -> AsyncIterator[tuple[GangSupervisor, list[Gang]]]:
    """Yield a supervisor and all values that its gang has had."""
    config, seen = load(None, ["control.stall_timeout_s=0.1", *sets]), list[Gang]()
    supervisor = GangSupervisor(
        plan_gangs(config)[0], config, machines, machines, lambda: seen.append(supervisor.gang)
    )
    supervisor.start()
    try:
        yield supervisor, seen
    finally:
        await supervisor.stop(0.05)


def note(gang: Gang) -> str:
    return "" if gang.failure is None else gang.failure.text


async def test_a_start_is_told_until_it_is_ready() -> None:
    machines = FakeMachines()
    async with kept(machines) as (supervisor, seen):
        await until(lambda: machines.lives)
        rank = machines.lives[101]
        rank.become(0.5)
        await until(lambda: supervisor.gang.startup_notes == ("prefill-0: loading weights, 50%",))
        assert supervisor.gang.state == STARTING and not note(supervisor.gang)
        rank.become()
        await until(lambda: supervisor.gang.state == READY)
        [member] = supervisor.gang.members
        assert (member.spec.epoch, member, rank.told) == (101, rank.state.info, (7, 101))
        assert len(set(map(repr, seen))) == len(seen), "a change is told once"
    assert rank.is_stopped and rank.is_killed and machines.cleared == [supervisor.gang.name]


async def test_a_dead_rank_gets_a_new_life_with_a_later_epoch(tmp_path: Path) -> None:
    machines = FakeMachines(lambda rank: rank.become())
    machines.log_path = str(tmp_path / "err")
    Path(machines.log_path).write_text("x" * 5000 + "\nSegmentation fault")
    async with kept(machines) as (supervisor, seen):
        await until(lambda: supervisor.gang.state == READY)
        machines.lives[101].death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.lives[101].is_killed and machines.cleared == [supervisor.gang.name]
        [lost] = [gang for gang in seen if gang.state == LOST]
        assert not lost.members and lost.epoch == 101
        assert "connection reset" in note(lost) and note(lost).endswith("Segmentation fault")
        assert len(note(lost)) < 2100


async def test_room_that_cannot_be_given_back_does_not_end_the_keeping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machines = FakeMachines(lambda rank: rank.become())
    async with kept(machines) as (supervisor, _):
        await until(lambda: supervisor.gang.state == READY)
        machines.clear_error = ConnectionError("no head node")
        machines.lives[101].death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert "no head node" in caplog.text and not machines.cleared
        machines.clear_error = None
    assert machines.cleared == [supervisor.gang.name]


@pytest.mark.parametrize("service_s", [60, 0])
async def test_who_keeps_dying_is_begun_anew_for_ever(service_s: int) -> None:
    """A gang whose ranks keep dying is restarted indefinitely. Its consecutive failures are counted
    until an epoch is stable or ``start`` is called again."""

    def doomed(rank: FakeRank) -> None:
        rank.become()
        asyncio.get_running_loop().call_later(
            0.02, lambda: setattr(rank, "death", RankLost("again"))
        )

    machines = FakeMachines(doomed)
    async with kept(machines, f"control.failure_reset_s={service_s}") as (supervisor, seen):
        await until(lambda: len(machines.lives) > 6)
        assert DOWN not in {gang.state for gang in seen} and "again" in note(supervisor.gang)
        assert supervisor.history.num_failures == (1 if service_s == 0 else len(machines.lives) - 1)
        given_up = {gang.epoch: gang.is_given_up for gang in seen if gang.state == STARTING}
        wanted = [service_s != 0 and num >= 3 for num in range(6)]
        assert [given_up[101 + num] for num in range(6)] == wanted, "after three deaths in a row"
        supervisor.start()
        assert supervisor.history.num_failures == 0 and not supervisor.gang.is_given_up


async def test_the_users_mistake_leaves_it_down_at_once() -> None:
    def wrong(rank: FakeRank) -> None:
        spec = rank.state.spec
        failure = Failure("ValueError", "model.path: there is no such folder")
        rank.state = RankState(spec, "{}", 1, "", (0, 0), failure=failure)

    machines = FakeMachines(wrong)
    async with kept(machines) as (supervisor, _):
        await until(lambda: supervisor.gang.state == DOWN)
        assert supervisor.gang.failure == Failure(
            "ValueError", "model.path: there is no such folder"
        )
        assert len(machines.lives) == 1 and machines.lives[101].is_killed


async def test_who_is_told_that_it_is_down_may_begin_it_again() -> None:
    """A gang is reported DOWN only once its placement group is released, so that it can be started
    again at once."""
    machines, config = FakeMachines(), load()
    machines.refusal = Overloaded("no room")
    cleared: list[int] = []

    def on_change() -> None:
        if supervisor.gang.state == DOWN:
            cleared.append(len(machines.cleared))

    supervisor = GangSupervisor(plan_gangs(config)[0], config, machines, machines, on_change)
    supervisor.start()
    await until(lambda: cleared)
    assert cleared == [1]
    await supervisor.stop(0.05)


async def test_want_of_room_is_final_only_for_who_never_served() -> None:
    machines = FakeMachines(lambda rank: rank.become())
    machines.refusal = Overloaded("no room")
    async with kept(machines) as (supervisor, _):
        await until(lambda: supervisor.gang.state == DOWN)
        assert note(supervisor.gang) == "no room"
        machines.refusal = None
        supervisor.start()
        await until(lambda: supervisor.gang.state == READY)
        machines.refusal = Overloaded("no room")
        machines.lives[max(machines.lives)].death = RankLost("its machine is gone")
        await until(lambda: machines.seen[1] > 106)
        assert supervisor.gang.state != DOWN
        machines.refusal = None
        await until(lambda: supervisor.gang.state == READY)


async def test_a_silent_rank_is_ended_only_when_somebody_suspects_it() -> None:
    machines = FakeMachines(lambda rank: rank.become())
    async with kept(machines) as (supervisor, _):
        await until(lambda: supervisor.gang.state == READY)
        machines.lives[101].is_frozen = True
        supervisor.report(100, "of an earlier life")
        await machines.lives[101].asked(3)
        assert (supervisor.gang.state, supervisor.gang.epoch) == (READY, 101)
        supervisor.report(101, "its frames have stopped")
        await until(lambda: supervisor.gang.epoch == 102)
        assert "its frames have stopped" in note(supervisor.gang) and machines.lives[101].is_killed


async def test_what_is_said_of_a_life_as_it_is_stopped_is_not_held_against_the_next() -> None:
    """Reports about an epoch that is being stopped do not count against the next one, which does
    not answer yet. The frames of the old epoch end at that time."""

    def starts(rank: FakeRank) -> None:
        rank.is_frozen = rank.state.spec.epoch == 102

    async with kept(FakeMachines(starts), "control.stall_timeout_s=0.05") as (supervisor, _):
        machines = supervisor.machines
        await until(lambda: machines.lives)
        machines.lives[101].become()
        await until(lambda: supervisor.gang.state == READY)
        await supervisor.stop(0.05)
        supervisor.report(101, "its stream of frames ended")
        supervisor.start()
        await until(lambda: 102 in machines.lives)
        await machines.lives[102].asked(3)
        assert supervisor.gang.epoch == 102 and supervisor.gang.failure is None


async def test_a_suspect_that_answers_is_left_alone() -> None:
    machines = FakeMachines(lambda rank: rank.become())
    async with kept(machines) as (supervisor, _):
        await until(lambda: supervisor.gang.state == READY)
        supervisor.report(101, "slow")
        await machines.lives[101].asked(3)
        machines.lives[101].is_frozen = True
        await machines.lives[101].asked(3)
        assert (supervisor.gang.state, supervisor.gang.epoch) == (READY, 101)


async def test_a_rank_that_answers_but_does_not_step_is_ended() -> None:
    machines = FakeMachines(lambda rank: rank.become())
    async with kept(machines) as (supervisor, _):
        await until(lambda: supervisor.gang.state == READY)
        rank = machines.lives[101]
        rank.state = replace(rank.state, engine_progress=EngineProgress(7, 9.0, 10.0))
        await rank.asked(3)
        assert (supervisor.gang.state, supervisor.gang.epoch) == (READY, 101)
        rank.state = replace(rank.state, engine_progress=EngineProgress(7, 11.0, 10.0))
        await until(lambda: supervisor.gang.epoch == 102)
        assert rank.is_killed and "in one step for 11 s (limit 10 s)" in note(supervisor.gang)


KILLED, SEGFAULT = "worker died", "Fatal Python error: Segmentation fault\n\nCurrent thread"
ERRORS = {"death": RankLost("it died"), "stop": StepFailed("the engine stopped")}


@pytest.mark.parametrize(
    ("end", "log", "counts"),
    [
        ("death", SEGFAULT, True),
        ("death", KILLED, False),
        ("stop", KILLED, True),
    ],
)
async def test_only_a_death_whose_cause_lay_in_the_step_names_suspects(
    end: str, log: str, counts: bool, tmp_path: Path
) -> None:
    (tmp_path / "err").write_text(log)
    in_step = InFlightBatch((Identity("a"), Identity("b")), False)
    machines = FakeMachines(lambda rank: rank.become())
    machines.log_path, machines.in_step = str(tmp_path / "err"), in_step
    async with kept(machines) as (supervisor, _):
        await until(lambda: supervisor.gang.state == READY)
        machines.lives[101].death = ERRORS[end]
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert supervisor.gang.epoch_end == EpochEnd(101, in_step if counts else None)
        machines.in_step = None
        machines.lives[102].death = ERRORS[end]
        await until(lambda: supervisor.gang.epoch == 103)
        assert supervisor.gang.epoch_end == EpochEnd(102, None), "it was in no step"


async def test_an_adopted_life_goes_on_and_a_frozen_rank_stops_in_time() -> None:
    machines = FakeMachines(lambda rank: rank.become())
    config = load()
    plan = plan_gangs(config)[0]
    supervisor = GangSupervisor(plan, config, machines, machines, lambda: None)
    rank = FakeRank(plan.specs(55, ["127.0.0.1"])[0])
    rank.become()
    supervisor.start([rank], [rank.state])
    await until(lambda: supervisor.gang.state == READY)
    assert supervisor.gang.epoch == 55 and not machines.lives
    rank.is_frozen = True
    async with asyncio.timeout(PATIENCE_S):
        await supervisor.stop(0.1)
    assert rank.is_killed and not rank.is_stopped and machines.cleared == [supervisor.gang.name]
