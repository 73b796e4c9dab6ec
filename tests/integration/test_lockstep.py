"""Planner, members and collectives over real sockets and gloo: no rank waits indefinitely."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from tandem.core.errors import EpochEnded, ProgramFailed
from tandem.core.info import DECODE
from tandem.core.membership import RankSpec, Rendezvous
from tandem.net import framing
from tandem.net.framing import MAX_PENDING_HANDSHAKES, encode_frame
from tandem.runtime.gang import gang_lockstep as member_module
from tandem.runtime.gang import planner_server as hub_module
from tandem.runtime.gang.gang_lockstep import GangLockstep
from tandem.runtime.gang.planner_server import RANK_GREETING, PlannerServer
from tandem.runtime.stall_detector import StallDetector
from tests.ranks import CPU
from tests.waiting import wait_until

LOOPBACK = "127.0.0.1"
PATIENCE_S = 20.0


def total(proposals: Sequence[int]) -> int | None:
    return sum(proposals) or None


class Ranks:
    """Members of one epoch, each with a separate thread for its calls."""

    def __init__(self, num_ranks: int, decide: Callable[[Sequence[int]], int | None]) -> None:
        self.hub = PlannerServer(num_ranks, LOOPBACK)
        self._threads = [ThreadPoolExecutor(1) for _ in range(num_ranks)]
        self.asked = [threading.Event() for _ in range(num_ranks)]
        self.stall_detectors = [StallDetector(PATIENCE_S / 3) for _ in range(num_ranks)]
        self._decide = decide
        entered = [self._enter(rank) for rank in range(num_ranks)]
        self.members = [one.result(30) for one in entered]

    def _enter(self, rank: int) -> "Future[GangLockstep]":
        spec = RankSpec("decode-0", DECODE, 7, rank, len(self._threads))
        hub = self.hub if rank == 0 else None
        given = spec, self.hub.rendezvous, hub, CPU, self.stall_detectors[rank]
        return self._threads[rank].submit(GangLockstep, *given)

    def begin(self, *ranks: int) -> None:
        """Mark the engines of these ranks as built; of all ranks if none is named."""
        for rank in ranks or range(len(self.members)):
            self.members[rank].planner(self._decide, (int, int), self.asked[rank].set)

    def plan(self, rank: int, proposal: int) -> "Future[tuple[int, int | None]]":
        def planned() -> tuple[int, int | None]:
            plan = self.members[rank].plan(proposal)
            return plan.step, plan.key

        return self._threads[rank].submit(planned)

    def call(self, rank: int, work: Callable[[GangLockstep], object]) -> "Future[object]":
        return self._threads[rank].submit(work, self.members[rank])

    def close(self) -> None:
        for rank, member in enumerate(self.members):
            self._threads[rank].submit(member.close).result(30)
            self._threads[rank].shutdown()


@contextmanager
def ranks_of(
    num_ranks: int, decide: Callable[[Sequence[int]], int | None] = total
) -> Iterator[Ranks]:
    before = threading.active_count()
    ranks = Ranks(num_ranks, decide)
    try:
        yield ranks
    finally:
        ranks.close()
        wait_until(lambda: threading.active_count() <= before, "threads are left")


def all_to_all(member: GangLockstep) -> list[float]:
    given = torch.full((member.collectives.num_ranks,), float(member.collectives.rank))
    return member.collectives.all_to_all(given).tolist()


def test_who_has_work_wakes_the_others_and_all_get_one_plan() -> None:
    with ranks_of(3) as ranks:
        ranks.begin()
        assert not any(member.is_step_requested for member in ranks.members)
        first = ranks.plan(2, 5)
        for rank in (0, 1):
            assert ranks.asked[rank].wait(PATIENCE_S) and ranks.members[rank].is_step_requested
        plans = [first, ranks.plan(0, 0), ranks.plan(1, 1)]
        assert [plan.result(PATIENCE_S) for plan in plans] == [(1, 6)] * 3
        assert not any(member.is_step_requested for member in ranks.members), "parked"
        answers = [ranks.call(rank, all_to_all) for rank in range(3)]
        assert [answer.result(PATIENCE_S) for answer in answers] == [[0.0, 1.0, 2.0]] * 3
        assert (
            str(ranks.stall_detectors[1].measure_progress().position)
            == "step 1, collective 1 (all_to_all)"
        )


class Device:
    """A group of one rank, whose collective ends only when it is aborted."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.freed.set()


def test_a_device_that_waits_for_a_rank_that_stands_still_is_freed_in_time() -> None:
    """The hung rank's connection stays open, so it gives no sign of the failure."""
    device = Device()

    def read(member: GangLockstep) -> None:
        with member.waiting_for_device():
            assert device.freed.wait(PATIENCE_S)

    with ranks_of(2) as ranks:
        ranks.begin()
        member = ranks.members[1]
        member.collectives._group = device
        member._timeout_s = lambda: 0.2
        with pytest.raises(EpochEnded, match="step 0, collective 1 .* has not ended in time"):
            ranks.call(1, read).result(PATIENCE_S)
        with pytest.raises(EpochEnded):
            ranks.plan(0, 1).result(PATIENCE_S)


def test_a_gang_that_idles_after_a_step_that_was_read_in_time_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The idle time is unlimited: the deadline for reading a step ends when the step is read."""
    monkeypatch.setattr(member_module, "TICK_S", 0.01)
    looks: list[float] = []

    def much_later() -> float:
        looks.append(time.monotonic() + 1e6)
        return looks[-1]

    def read(member: GangLockstep) -> None:
        with member.waiting_for_device():
            pass
        member._clock = much_later

    with ranks_of(2) as ranks:
        ranks.begin()
        ranks.call(1, read).result(PATIENCE_S)
        wait_until(lambda: len(looks) > 1 or not ranks.members[1]._reader.is_alive())
        plans = [ranks.plan(rank, 1) for rank in range(2)]
        assert [plan.result(PATIENCE_S) for plan in plans] == [(1, 2)] * 2


def test_a_rank_that_enters_early_is_remembered() -> None:
    """Rank 1 proposes before rank 0's engine has been built, and proposes its next step at once."""
    with ranks_of(2) as ranks:
        ranks.begin(1)
        early = ranks.plan(1, 4)
        assert not early.done()
        ranks.begin(0)
        assert ranks.asked[0].wait(PATIENCE_S)
        assert ranks.plan(0, 0).result(PATIENCE_S) == early.result(PATIENCE_S) == (1, 4)
        again = ranks.plan(1, 3)
        wait_until(lambda: ranks.members[0].is_step_requested)
        assert ranks.plan(0, 2).result(PATIENCE_S) == again.result(PATIENCE_S) == (2, 5)


def test_a_life_that_ends_before_rank_0_is_built_leaves_no_planner() -> None:
    """All ranks have joined and none has started."""
    with ranks_of(2) as ranks:
        connections = ranks.hub._connections
        wait_until(lambda: len(connections) == 2)
    assert all(one.fileno() == -1 for one in connections.values())


def test_a_slow_planner_is_waited_for_and_one_that_never_answers_is_not() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(proposals: Sequence[int]) -> int | None:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return total(proposals)

    with ranks_of(2, slow) as ranks:
        ranks.begin()
        plans = [ranks.plan(rank, 1) for rank in range(2)]
        assert entered.wait(PATIENCE_S)
        assert not any(plan.done() for plan in plans)
        go_on.set()
        assert [plan.result(PATIENCE_S) for plan in plans] == [(1, 2)] * 2
        ranks.members[1]._timeout_s = lambda: 0.1
        with pytest.raises(EpochEnded, match=r"step 2: the planner sent no plan within 0.1 s"):
            ranks.plan(1, 1).result(PATIENCE_S)


@pytest.mark.parametrize("leaver", [0, 2])
def test_who_leaves_ends_the_epoch_for_all_parked_or_waiting_or_computing(leaver: int) -> None:
    """The leaver is the planner's rank or another one."""
    with ranks_of(3) as ranks:
        ranks.begin()
        plans = [ranks.plan(rank, 1) for rank in range(3)]
        assert [plan.result(PATIENCE_S) for plan in plans] == [(1, 3)] * 3
        [waits, computes] = [rank for rank in range(3) if rank != leaver]
        stuck = ranks.call(computes, all_to_all)
        plan = ranks.plan(waits, 1)
        stands, asks = (ranks.members[rank].collectives for rank in (computes, waits))
        wait_until(lambda: stands.position.number == 1 and asks.position.step == 2)
        assert not stuck.done() and not plan.done()
        ranks.call(leaver, GangLockstep.close).result(PATIENCE_S)
        with pytest.raises(EpochEnded, match=r"step 1, collective 1 \(all_to_all\)"):
            stuck.result(PATIENCE_S)
        with pytest.raises(EpochEnded, match="step 2"):
            plan.result(PATIENCE_S)
        wait_until(lambda: ranks.members[computes].is_step_requested, "the parked are woken")
        with pytest.raises(EpochEnded):
            ranks.plan(computes, 0).result(PATIENCE_S)


def test_a_planner_that_fails_ends_the_epoch() -> None:
    def wrong(proposals: Sequence[int]) -> int | None:
        raise KeyError("no such length")

    with ranks_of(2, wrong) as ranks:
        ranks.begin()
        for plan in [ranks.plan(rank, 1) for rank in range(2)]:
            with pytest.raises(EpochEnded):
                plan.result(PATIENCE_S)


def test_an_error_in_what_all_compute_is_told_from_the_loss_of_a_peer() -> None:
    with ranks_of(2) as ranks:
        ranks.begin()

        def broken(member: GangLockstep) -> None:
            with member.collective_section():
                raise RuntimeError("cosmic ray")

        with pytest.raises(ProgramFailed, match=r"decode-0\.7\.1.*cosmic ray"):
            ranks.call(1, broken).result(PATIENCE_S)
        ranks.call(1, GangLockstep.close).result(PATIENCE_S)
        with pytest.raises(EpochEnded) as lost:
            ranks.call(0, all_to_all).result(PATIENCE_S)
        assert not isinstance(lost.value, ProgramFailed)


def test_a_collective_that_nobody_else_enters_ends_with_its_own_deadline() -> None:
    with ranks_of(2) as ranks:
        ranks.begin()
        ranks.members[0].collectives.start_step(3, 0.2)
        with pytest.raises(EpochEnded, match=r"rank 0, step 3, collective 1 \(all_to_all\)"):
            ranks.call(0, all_to_all).result(PATIENCE_S)


@pytest.mark.parametrize("is_known", [False, True], ids=["its store", "its planner"])
def test_a_meeting_that_nobody_holds_any_more_is_no_fault_of_who_comes(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 died after opening the rendezvous and before the others joined. The other processes
    are healthy."""
    with socket.create_server((LOOPBACK, 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setattr("tandem.runtime.gang.gang_lockstep.CONNECT_S", 0.5)
    if is_known:
        monkeypatch.setattr("tandem.runtime.gang.gang_lockstep.connect", lambda **options: None)
    spec = RankSpec("decode-0", DECODE, 7, 1, 2)
    with pytest.raises(EpochEnded, match="planner" if is_known else "cannot be created"):
        GangLockstep(
            spec, Rendezvous(LOOPBACK, port, port, b"x" * 32), None, CPU, StallDetector(1.0)
        )


@pytest.mark.parametrize(
    "says",
    [
        lambda token: encode_frame(bytes(len(token)) + RANK_GREETING.pack(1)),
        lambda token: encode_frame(token),
        lambda token: encode_frame(token + RANK_GREETING.pack(2)),
        lambda token: encode_frame(token + RANK_GREETING.pack(1 << 31)),
        lambda token: token + RANK_GREETING.pack(1),
        lambda token: b"x",
        lambda token: b"",
    ],
    ids=["wrong", "nobody", "a rank too many", "no rank at all", "unframed", "short", "silent"],
)
def test_strangers_do_not_get_in(
    says: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that connects first and is no rank is rejected, and the ranks still meet."""
    strangers: list[socket.socket] = []

    class Visited(PlannerServer):
        def __init__(self, num_ranks: int, host: str) -> None:
            super().__init__(num_ranks, host)
            strangers.append(socket.create_connection((host, self.rendezvous.port), 5))
            strangers[0].sendall(says(self.rendezvous.token))

    monkeypatch.setattr("tests.integration.test_lockstep.PlannerServer", Visited)
    with ranks_of(2) as ranks:
        ranks.begin()
        plans = [ranks.plan(rank, 1) for rank in range(2)]
        assert [plan.result(PATIENCE_S) for plan in plans] == [(1, 2)] * 2
        with suppress(ConnectionResetError):  # the peer's message was not read to its end
            assert strangers[0].recv(1) == b""
    strangers[0].close()


def test_strangers_who_say_nothing_hold_up_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """More peers than the planner listens to at once connect before the first rank."""
    strangers: list[socket.socket] = []

    class Besieged(PlannerServer):
        def __init__(self, num_ranks: int, host: str) -> None:
            super().__init__(num_ranks, host)
            for _ in range(MAX_PENDING_HANDSHAKES + 20):
                strangers.append(socket.create_connection((host, self.rendezvous.port), 5))
            assert all(one.recv(1) == b"" for one in strangers[:20]), "too many are kept"

    monkeypatch.setattr("tests.integration.test_lockstep.PlannerServer", Besieged)
    with ranks_of(2) as ranks:
        ranks.begin()
        plans = [ranks.plan(rank, 1) for rank in range(2)]
        assert [plan.result(PATIENCE_S) for plan in plans] == [(1, 2)] * 2
        for one in strangers:
            with suppress(ConnectionResetError):
                assert one.recv(1) == b"", "who is no rank is held on to"
            one.close()


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent peer is dropped even if no rank and no other peer connects."""
    for module in (framing, hub_module):
        monkeypatch.setattr(module, "GREETING_S", 0.1)
    hub = PlannerServer(2, LOOPBACK)
    with socket.create_connection((LOOPBACK, hub.rendezvous.port), PATIENCE_S) as stranger:
        stranger.sendall(b"\x00")
        assert stranger.recv(1) == b""
    hub.close()


def test_a_message_is_not_as_long_as_it_says() -> None:
    with ranks_of(2) as ranks:
        ranks.begin()
        ranks.members[1]._connection.sendall(b"\x00\xff\xff\xff")
        for rank in range(2):
            with pytest.raises(EpochEnded):
                ranks.plan(rank, 1).result(PATIENCE_S)
