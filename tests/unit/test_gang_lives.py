"""A gang of several ranks: a dead rank is replaced and the others join the next epoch."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from tandem.cluster.control import gang_supervisor as gang_module
from tandem.cluster.control import machines as machines_module
from tandem.cluster.control import rank_group, restart_policy
from tandem.cluster.control.failure import CrashReport, EpochFailure, EpochOver
from tandem.cluster.control.gang_supervisor import GangSupervisor
from tandem.cluster.control.machines import RayMachines
from tandem.cluster.control.plan import (
    GROUP_LABEL,
    REPLICA_LABEL,
    EpochLaunch,
    GangPlan,
    Machine,
    choose_label_selector,
    no_capacity_message,
    plan_gangs,
)
from tandem.core.config import TandemConfig, load
from tandem.core.errors import EpochEnded, ProgramFailed, RankLost
from tandem.core.identity import Identity
from tandem.core.membership import (
    DOWN,
    LOST,
    READY,
    EpochEnd,
    ExpertRows,
    Gang,
    InFlightBatch,
    RankInfo,
    RankSpec,
    RankState,
    Rendezvous,
)
from tandem.core.placement import Placement
from tandem.core.progress import EngineProgress, LockstepPosition
from tandem.core.schema import to_failure
from tests.unit.test_gang import MODEL, note
from tests.waiting import for_ever, turns, until

NUM_RANKS = 3


class FakeRank:
    def __init__(self, spec: RankSpec) -> None:
        self.name = spec.process_name
        self.state = RankState(spec, "{}", 1, "", (0, 0), is_loaded=True)
        self.joined: list[tuple[RankSpec, Rendezvous]] = []
        self.num_left = 0
        self.num_asked, self.may_answer = 0, asyncio.Event()
        self.may_answer.set()
        self.death: Exception | None = None
        self.kill_error: Exception | None = None
        self.leave_error: Exception | None = None
        self.rows: ExpertRows | None = None
        self.can_leave, self.is_frozen, self.is_killed = True, False, False

    async def get_state(self, incarnation: int, epoch: int, weights: str | None) -> RankState:
        self.num_asked += 1
        if self.is_frozen:
            await for_ever()
        if self.death is not None:
            raise self.death
        await self.may_answer.wait()
        return self.state

    async def asked(self, num: int) -> None:
        """Wait until the rank was polled ``num`` more times."""
        last = self.num_asked + num
        await until(lambda: self.num_asked >= last)

    async def open_rendezvous(self) -> Rendezvous:
        return Rendezvous(f"{self.state.spec.process_name}", 1, 2, b"token")

    async def join(self, spec: RankSpec, rendezvous: Rendezvous) -> None:
        assert not self.state.is_joined
        self.joined.append((spec, rendezvous))
        info = RankInfo(spec, ("f",), "none", MODEL, 9, 9)
        self.state = replace(self.state, spec=spec, is_joined=True, info=info)

    async def leave(self) -> None:
        if self.leave_error is not None:
            raise self.leave_error
        if not self.can_leave:
            await for_ever()
        self.num_left += 1
        self.state = replace(
            self.state, is_joined=False, info=None, epoch_end_cause=None, engine_progress=None
        )

    async def expert_rows(self) -> ExpertRows:
        assert self.rows is not None
        return self.rows

    async def stop(self) -> None:
        return

    def kill(self) -> None:
        if self.kill_error is not None:
            raise self.kill_error
        self.is_killed = True

    def says(self, **fields: object) -> None:
        self.state = replace(self.state, **fields)  # type: ignore[arg-type]


class FakeMachines:
    """``begun`` holds (epoch, placement group's epoch, ranks) of each call; ``ranks`` the current
    ranks."""

    def __init__(self) -> None:
        self.ranks: dict[int, FakeRank] = {}
        self.begun: list[tuple[int, int, list[int]]] = []
        self.placements: list[Placement | None] = []
        self.asked_for_words: list[int] = []
        self.num_cleared = 0
        self.is_held, self.troubles = False, list[Exception]()
        self.may_tell_words = asyncio.Event()
        self.may_tell_words.set()
        self.in_step: dict[int, InFlightBatch] = {}
        self.seen = (7, 100)

    def next_epoch(self) -> int:
        self.seen = self.seen[0], self.seen[1] + 1
        return self.seen[1]

    async def launch_ranks(
        self, plan: GangPlan, launch: EpochLaunch, config: TandemConfig, ranks: dict[int, FakeRank]
    ) -> None:
        if self.troubles:
            raise self.troubles.pop()
        self.begun.append((launch.epoch, launch.placement_group_epoch, list(launch.missing)))
        self.placements.append(launch.placement)
        specs = plan.specs(launch.epoch, ["127.0.0.1"] * plan.num_ranks)
        if self.is_held:
            await for_ever()
        made = {
            r: FakeRank(replace(specs[r], placement_group_epoch=launch.placement_group_epoch))
            for r in launch.missing
        }
        self.ranks |= made
        ranks |= made

    async def read_crash_report(self, state: RankState) -> CrashReport:
        self.asked_for_words.append(state.spec.rank)
        await self.may_tell_words.wait()
        return CrashReport("", self.in_step.get(state.spec.rank))

    async def release_placement_group(self, gang: str) -> None:
        self.num_cleared += 1


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "STARTING_POLL_S"):
        monkeypatch.setattr(gang_module, name, 0.005)
    monkeypatch.setattr(restart_policy, "PAUSE_S", 0.005)
    monkeypatch.setattr(rank_group, "LEAVE_TIMEOUT_S", 0.1)


@asynccontextmanager
async def ready_gang() -> AsyncIterator[tuple[FakeMachines, GangSupervisor, list[Gang]]]:
    machines = FakeMachines()
    config = load(None, ["control.stall_timeout_s=0.1", f"prefill.dp_size={NUM_RANKS}"])
    seen: list[Gang] = []
    plan = plan_gangs(config)[0]
    supervisor = GangSupervisor(
        plan, config, machines, machines, lambda: seen.append(supervisor.gang)
    )
    supervisor.start()
    try:
        await until(lambda: supervisor.gang.state == READY)
        yield machines, supervisor, seen
    finally:
        await supervisor.stop(0.05)


def lives(machines: FakeMachines) -> list[tuple[int, int]]:
    """Return the epoch in which each rank's process was started, and the epoch that it is in."""
    specs = [machines.ranks[rank].state.spec for rank in range(NUM_RANKS)]
    return [(spec.process_epoch, spec.epoch) for spec in specs]


async def test_ranks_meet_at_rank_0_and_are_addressed_one_by_one() -> None:
    async with ready_gang() as (machines, supervisor, _):
        assert machines.begun == [(101, 101, [0, 1, 2])]
        assert lives(machines) == [(101, 101)] * 3
        meetings = {rank.joined[0][1].host for rank in machines.ranks.values()}
        assert meetings == {"prefill-0.101.0"}
        assert [member.spec.rank for member in supervisor.gang.members] == [0, 1, 2]
        assert len({member.spec.epoch_name for member in supervisor.gang.members}) == 3


@pytest.mark.parametrize("victim", range(NUM_RANKS))
async def test_who_dies_is_replaced_and_the_others_keep_their_processes(victim: int) -> None:
    """A dead rank is replaced, and the others keep their processes. This holds even if they report
    the end of the epoch before the death is known."""
    async with ready_gang() as (machines, supervisor, seen):
        before = dict(machines.ranks)
        for rank in before.values():
            rank.says(epoch_end_cause=to_failure(EpochEnded("the planner ended the epoch")))
        before[victim].death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 101, [victim])], "in the room that there is"
        assert lives(machines) == [(102 if r == victim else 101, 102) for r in range(NUM_RANKS)]
        assert [before[r].is_killed for r in range(NUM_RANKS)] == [
            r == victim for r in range(NUM_RANKS)
        ]
        assert all(before[r].num_left == (r != victim) for r in range(NUM_RANKS))
        [lost] = [gang for gang in seen if gang.state == LOST]
        assert not lost.members and "connection reset" in note(lost)
        assert machines.asked_for_words == [victim] and not machines.num_cleared


async def test_the_others_leave_while_the_words_of_the_dead_are_fetched() -> None:
    """Surviving ranks leave the epoch while the log of the dead rank is fetched. On a lost machine
    that takes ten seconds, and a stopped peer delays leaving by five."""
    async with ready_gang() as (machines, supervisor, _):
        before = dict(machines.ranks)
        machines.may_tell_words.clear()
        before[1].death = RankLost("its machine is lost")
        await until(lambda: before[0].num_left == before[2].num_left == 1)
        assert machines.asked_for_words == [1] and supervisor.gang.epoch == 101
        machines.may_tell_words.set()
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert [before[rank].num_left for rank in range(NUM_RANKS)] == [1, 0, 1]


async def test_who_failed_tells_of_its_step_before_it_leaves() -> None:
    async with ready_gang() as (machines, supervisor, _):
        machines.may_tell_words.clear()
        machines.ranks[1].says(epoch_end_cause=to_failure(ProgramFailed("cosmic ray")))
        await until(lambda: machines.asked_for_words == [1])
        await turns(100)
        assert not any(rank.num_left for rank in machines.ranks.values())
        machines.may_tell_words.set()
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)


async def test_the_pause_before_a_life_begins_with_the_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause before the next epoch counts from the death, so fetching the log is part of it."""
    monkeypatch.setattr(restart_policy, "PAUSE_S", 1000.0)
    async with ready_gang() as (machines, supervisor, _):
        clock = SimpleNamespace(monotonic=time.monotonic, time=time.time)
        monkeypatch.setattr(gang_module, "time", clock)
        machines.may_tell_words.clear()
        machines.ranks[1].death = RankLost("connection reset")
        await until(lambda: machines.asked_for_words == [1])
        clock.monotonic = lambda: time.monotonic() + 1000.0
        machines.may_tell_words.set()
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)


async def test_who_cannot_leave_is_killed_too() -> None:
    async with ready_gang() as (machines, supervisor, _):
        before = dict(machines.ranks)
        before[0].can_leave = False
        before[2].death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 101, [0, 2])]
        assert before[0].is_killed and not before[1].is_killed


async def test_who_is_left_keeps_its_weights_while_the_others_room_is_moved() -> None:
    """Surviving ranks keep their weights while the placement group moves from a lost machine to
    another. The move takes as long as there is no other machine."""
    async with ready_gang() as (machines, supervisor, _):
        before = dict(machines.ranks)
        moves = RankLost("[2] of its ranks have no machine any more")
        machines.troubles = [EpochOver(moves), EpochOver(moves)]
        before[2].death = RankLost("its machine is lost")
        await until(lambda: supervisor.gang.epoch == 104 and supervisor.gang.state == READY)
        assert not machines.troubles and machines.begun == [(101, 101, [0, 1, 2]), (104, 101, [2])]
        assert not before[0].is_killed and not before[1].is_killed


async def test_who_cannot_leave_does_not_end_the_keeping() -> None:
    """A rank whose ``leave`` raises any error is killed, and the others keep their processes."""
    async with ready_gang() as (machines, supervisor, _):
        before = dict(machines.ranks)
        before[1].leave_error = RuntimeError("Ray is away")
        before[2].death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert [before[rank].is_killed for rank in range(NUM_RANKS)] == [False, True, True]
        assert machines.begun[1:] == [(102, 101, [1, 2])]


async def test_when_nobody_is_left_the_room_is_given_back() -> None:
    async with ready_gang() as (machines, supervisor, _):
        for rank in machines.ranks.values():
            rank.can_leave = False
        machines.ranks[1].death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 102, [0, 1, 2])] and machines.num_cleared == 1


async def test_an_error_in_a_program_replaces_nobody_and_names_its_own_rows() -> None:
    async with ready_gang() as (machines, supervisor, seen):
        mine = InFlightBatch((Identity("a"), Identity("b")), False)
        machines.in_step = {rank: InFlightBatch((Identity(f"r{rank}"),), True) for rank in (0, 2)}
        machines.in_step[1] = mine
        for rank in (0, 2):
            machines.ranks[rank].says(epoch_end_cause=to_failure(EpochEnded("closed by peer")))
        machines.ranks[1].says(epoch_end_cause=to_failure(ProgramFailed("cosmic ray")))
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 101, [])] and lives(machines) == [(101, 102)] * 3
        assert supervisor.gang.epoch_end == EpochEnd(101, mine)
        assert "cosmic ray" in note(next(gang for gang in seen if gang.state == LOST))


def stuck_at(step: int, number: int) -> EngineProgress:
    return EngineProgress(3, 11.0, 10.0, LockstepPosition(step, number, "all_to_all"))


@pytest.mark.parametrize(
    ("paces", "late"),
    [
        ([stuck_at(7, 4), stuck_at(7, 3), stuck_at(7, 4)], 1),
        ([stuck_at(7, 0), EngineProgress(3, 0.0, 10.0, LockstepPosition(6, 9)), stuck_at(7, 0)], 1),
        (
            [
                EngineProgress(3, 0.0, 10.0, LockstepPosition(6, 9)),
                EngineProgress(3, 0.0, 10.0, LockstepPosition(6, 9)),
                stuck_at(6, 9),
            ],
            2,
        ),
    ],
    ids=["late in a step", "never entered it", "stuck while all are parked"],
)
async def test_the_watchdog_ends_the_laggard_and_names_where_it_is(
    paces: list[EngineProgress], late: int
) -> None:
    async with ready_gang() as (machines, supervisor, seen):
        before = dict(machines.ranks)
        for rank, engine_progress in enumerate(paces):
            before[rank].says(engine_progress=engine_progress)
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 101, [late])]
        assert [before[r].is_killed for r in range(3)] == [r == late for r in range(3)]
        text = note(next(gang for gang in seen if gang.state == LOST))
        assert f"prefill-0.101.{late} keeps its gang waiting at {paces[late].position}" in text


async def test_who_is_silent_while_others_wait_is_ended_and_not_they() -> None:
    async with ready_gang() as (machines, supervisor, _):
        before = dict(machines.ranks)
        before[1].is_frozen = True
        await before[1].asked(3)
        assert supervisor.gang.epoch == 101, "it holds up nobody"
        for rank in (0, 2):
            before[rank].says(engine_progress=stuck_at(7, 3))
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 101, [1])] and before[1].is_killed


async def test_the_mistake_of_one_rank_leaves_the_gang_down_as_a_whole() -> None:
    async with ready_gang() as (machines, supervisor, _):
        machines.ranks[1].says(failure=to_failure(ValueError("model.path: it is gone")))
        await until(lambda: supervisor.gang.state == DOWN)
        assert all(rank.is_killed for rank in machines.ranks.values())
        assert machines.num_cleared == 1
        supervisor.start()
        await until(lambda: supervisor.gang.state == READY)


async def test_who_cannot_be_killed_does_not_end_the_keeping() -> None:
    """A rank that cannot be killed, as while Ray's head is away, does not delay the next epoch. The
    rank is killed when the head is back."""
    async with ready_gang() as (machines, supervisor, _):
        lost = machines.ranks[1]
        lost.kill_error = ConnectionError("no head node")
        lost.death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert not lost.is_killed
        lost.kill_error = None
        await until(lambda: lost.is_killed)
        assert supervisor.gang.epoch == 102 and supervisor.gang.state == READY


@pytest.mark.parametrize(
    ("num_joined", "has_left"), [(0, False), (0, True), (1, False), (NUM_RANKS, False)]
)
async def test_what_an_earlier_controller_left_is_taken_on(num_joined: int, has_left: bool) -> None:
    """A new controller adopts loaded, half joined, ready and departed ranks. No process ends and no
    epoch is joined twice."""
    machines, config = FakeMachines(), load(None, [f"prefill.dp_size={NUM_RANKS}"])
    plan = plan_gangs(config)[0]
    ranks = [FakeRank(spec) for spec in plan.specs(55, ["127.0.0.1"] * NUM_RANKS)]
    for rank in ranks[:num_joined]:
        await rank.join(rank.state.spec, await ranks[0].open_rendezvous())
    for rank in ranks if has_left else []:
        rank.says(spec=replace(rank.state.spec, process_epoch=50))
    supervisor = GangSupervisor(plan, config, machines, machines, lambda: None)
    supervisor.start(ranks, [rank.state for rank in ranks])  # type: ignore[arg-type]
    await until(lambda: supervisor.gang.state == READY)
    assert supervisor.gang.epoch == (101 if num_joined == 1 or has_left else 55)
    assert not any(rank.is_killed for rank in ranks) and not any(m for _, _, m in machines.begun)
    await supervisor.stop(0.05)


async def test_who_dies_in_a_gang_that_was_taken_on_in_its_second_life_is_replaced() -> None:
    """A rank that dies in the second epoch of an adopted gang is replaced in the first epoch's
    placement group. No other process ends."""
    machines, config = FakeMachines(), load(None, [f"prefill.dp_size={NUM_RANKS}"])
    plan = plan_gangs(config)[0]
    specs = plan.specs(55, ["127.0.0.1"] * NUM_RANKS)
    ranks = [FakeRank(replace(spec, placement_group_epoch=44, process_epoch=44)) for spec in specs]
    for rank in ranks:
        await rank.join(rank.state.spec, await ranks[0].open_rendezvous())
    supervisor = GangSupervisor(plan, config, machines, machines, lambda: None)
    supervisor.start(ranks, [rank.state for rank in ranks])  # type: ignore[arg-type]
    await until(lambda: supervisor.gang.state == READY)
    ranks[1].death = RankLost("connection reset")
    await until(lambda: supervisor.gang.epoch == 101 and supervisor.gang.state == READY)
    assert machines.begun == [(101, 44, [1])]
    assert [rank.is_killed for rank in ranks] == [False, True, False]
    await supervisor.stop(0.05)


async def test_ranks_that_differ_in_where_experts_lie_never_serve_together() -> None:
    """Ranks whose expert placements differ never serve together. They may differ if a controller
    could not read the placement of adopted ranks."""
    async with ready_gang() as (machines, supervisor, _):
        for rank in machines.ranks.values():
            rank.says(placement="another")
        before = dict(machines.ranks)
        before[1].death = RankLost("connection reset")
        await until(lambda: supervisor.gang.epoch == 103 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 101, [1]), (103, 103, [0, 1, 2])]
        assert all(rank.is_killed for rank in before.values())
        assert {rank.state.placement for rank in machines.ranks.values()} == {""}


async def test_a_suspicion_that_comes_while_others_still_answer_is_kept() -> None:
    """A suspicion that is reported during a poll is kept. The suspected rank has answered this poll
    and will not answer the next one."""
    async with ready_gang() as (machines, supervisor, _):
        before = dict(machines.ranks)
        before[0].may_answer.clear()
        await before[0].asked(1)
        before[1].is_frozen = True
        supervisor.report(101, "its frames have stopped")
        before[0].may_answer.set()
        await until(lambda: supervisor.gang.epoch == 102 and supervisor.gang.state == READY)
        assert machines.begun[1:] == [(102, 101, [1])]


def test_a_layout_that_cannot_be_placed_says_what_is_missing() -> None:
    config = load(None, ["decode.dp_size=8", "decode.num_threads=4", "decode.device=cuda"])
    there = [
        Machine({}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}),
        Machine({}, {"CPU": 8.0}, {"CPU": 4.0}),
    ]
    text = no_capacity_message(plan_gangs(config)[1], there)
    assert text == (
        "decode-0: not enough resources: needs 4 CPU for each of 8 ranks (12 of 16 in this Ray "
        "cluster are free); 1 GPU for each of 8 ranks (4 of 4 in this Ray cluster are free); add "
        "machines, or lower decode.dp_size, decode.replicas or decode.num_threads"
    )


def machine(group: str | None, replica: str | None, free: float) -> Machine:
    given = {GROUP_LABEL: group, REPLICA_LABEL: replica}
    labels = {key: value for key, value in given.items() if value is not None}
    return Machine(labels, {"CPU": 8.0}, {"CPU": free})


def test_a_gang_lies_in_its_group_and_in_one_replica() -> None:
    gangs = [GangPlan(f"decode-{i}", "decode", 4, {"CPU": 2.0}, "big") for i in range(3)]
    by_hand = [machine(None, None, 8), machine("big", None, 3)]
    assert choose_label_selector(replace(gangs[0], group=None), by_hand) == {}
    assert choose_label_selector(gangs[0], by_hand) == {GROUP_LABEL: "big"}
    # Five CPUs hold two ranks: "a" can hold three in all, "b" five, "c" four.
    pods = [("a", 5), ("a", 2), ("b", 8), ("b", 2), ("c", 4), ("c", 5)]
    replicas = [machine("big", name, free) for name, free in pods]
    others = [machine("small", "d", 8), machine(None, None, 8), machine("big", "", 8)]
    found = [choose_label_selector(gang, replicas + others) for gang in gangs]
    assert found == [{GROUP_LABEL: "big", REPLICA_LABEL: name} for name in "bcb"]
    assert choose_label_selector(gangs[1], replicas[:4] + others) == {
        GROUP_LABEL: "big",
        REPLICA_LABEL: "b",
    }
    assert choose_label_selector(gangs[1], replicas[:2] + others) == {
        GROUP_LABEL: "big",
        REPLICA_LABEL: "a",
    }  # the gang waits there
    small = replace(gangs[0], group="small")
    assert choose_label_selector(small, replicas + others) == {
        GROUP_LABEL: "small",
        REPLICA_LABEL: "d",
    }


def test_a_group_that_is_not_there_is_named_beside_those_that_are() -> None:
    gang = GangPlan("prefill-0", "prefill", 1, {"CPU": 1.0}, "larg")
    there = [machine("large", None, 8), machine("small", None, 8), machine(None, None, 8)]
    assert "this Ray cluster has none; its groups are ['large', 'small']" in no_capacity_message(
        gang, there
    )
    assert "its groups are none" in no_capacity_message(gang, there[2:])
    text = no_capacity_message(replace(gang, group="large", num_ranks=9), there)
    assert "1 CPU for each of 9 ranks (8 of 8 in group 'large' are free)" in text


async def test_that_ray_does_not_answer_is_no_fault_of_a_gangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gang is not blamed while Ray's head is away: restart pauses do not grow, however often Ray
    fails to answer."""

    def no_head(plan: GangPlan, launch: EpochLaunch) -> None:
        raise RaySystemError("the head is away")

    monkeypatch.setattr(machines_module, "_get_placement_group", no_head)
    config, history = load(None, []), restart_policy.RestartHistory()
    plan = plan_gangs(config)[0]
    for _ in range(5):
        with pytest.raises(
            EpochOver, match="Ray could not start its ranks: .*the head is away"
        ) as raised:
            await RayMachines().launch_ranks(plan, EpochLaunch(1, 1, (0,), None), config, {})
        death = EpochFailure(raised.value.cause, frozenset(), ())
        decision = restart_policy.decide_restart(history, death, 0.0)
        history = decision.history
        assert decision.pause_s == restart_policy.PAUSE_S


async def test_ranks_begun_before_ray_fell_silent_end_and_the_others_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If Ray fails during a launch, the ranks that were already started count as lost. They would
    hold the resources of the next launch."""
    config = load(None, [f"prefill.dp_size={NUM_RANKS}"])
    plan = plan_gangs(config)[0]
    specs = plan.specs(1, ["127.0.0.1"] * NUM_RANKS)
    ranks = {0: FakeRank(specs[0])}

    def create(spec: RankSpec, *more: object) -> FakeRank:
        if spec.rank == 2:
            raise RaySystemError("the head is away")
        return FakeRank(spec)

    monkeypatch.setattr(machines_module, "_get_placement_group", lambda plan, launch: None)
    monkeypatch.setattr(
        machines_module, "_rank_hosts", lambda group, host: ["127.0.0.1"] * NUM_RANKS
    )
    monkeypatch.setattr(machines_module, "_create_rank", create)
    with pytest.raises(EpochOver, match="the head is away") as raised:
        await RayMachines().launch_ranks(plan, EpochLaunch(2, 1, [1, 2], None), config, ranks)
    assert raised.value.lost_ranks == {1} and ranks.keys() == {0, 1}
