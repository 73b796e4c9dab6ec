"""Ranks that start: timeouts count from their last answer or progress, and their activity is
reported."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.control.failure import EpochOver
from tandem.cluster.control.members import RayMembers, _log_notices
from tandem.cluster.control.plan import GangPlan
from tandem.cluster.control.rank_group import MAX_UNANSWERED, RankGroup
from tandem.core.config import load
from tandem.core.errors import RankLost
from tandem.core.info import ModelInfo
from tandem.core.membership import (
    DOWN,
    LOST,
    READY,
    STARTING,
    Gang,
    Membership,
    RankInfo,
    RankSpec,
    RankState,
)
from tandem.core.progress import LOADING
from tandem.core.schema import Failure
from tests.waiting import for_ever

START_S = 0.3
"""Startup timeout by the clock of these tests, which each poll advances by TICK_S."""
TICK_S = 0.02
SEEN = (7, 100)
INFO = RankInfo(
    RankSpec("d", "decode", 5),
    ("f",),
    "none",
    ModelInfo("t", "v3", 9, 9, (1,), 3, True, "float32"),
    9,
    9,
)


class FakeRank:
    """A rank whose n-th answer is ``says(n)``. None means no answer."""

    def __init__(self, rank: int, says: Callable[[int], dict[str, object] | None]) -> None:
        self.spec, self.says, self.num_asked = RankSpec("d", "decode", 5, rank, 2), says, 0

    async def get_state(self, incarnation: int, epoch: int, weights: str | None) -> RankState:
        self.num_asked += 1
        said = self.says(self.num_asked)
        if said is None:
            await for_ever()
        return RankState(self.spec, "{}", 1, "", (0, 0), **(said or {}))  # type: ignore[arg-type]

    def kill(self) -> None:
        pass


def rank_group(*says: Callable[[int], dict[str, object] | None]) -> RankGroup:
    control = load(
        None, ["control.stall_timeout_s=0.05", f"control.startup_timeout_s={START_S}"]
    ).control
    made = RankGroup(GangPlan("d", "decode", len(says), {}), control)
    made.handles = {rank: FakeRank(rank, one) for rank, one in enumerate(says)}  # type: ignore[misc]
    return made


async def asked(
    ranks: RankGroup, for_s: float, monkeypatch: pytest.MonkeyPatch, from_s: float = 0.0
) -> None:
    for tick in range(round(from_s / TICK_S), round((from_s + for_s) / TICK_S)):
        clock = SimpleNamespace(monotonic=lambda now=tick * TICK_S: now)
        monkeypatch.setattr("tandem.cluster.control.rank_group.time", clock)
        await ranks.poll_states(SEEN)


def moves(n: int) -> dict[str, object]:
    return {"activity": LOADING, "progress": n / 10_000}


def hangs(n: int) -> dict[str, object]:
    return {"activity": "waiting for process 4711, which compiles kernels", "progress": 0.5}


def silent(n: int) -> None:
    return None


def stopped(n: int) -> dict[str, object] | None:
    return {"activity": "joining its gang", "is_loaded": True, "is_joined": True} if n < 5 else None


def joins(n: int) -> dict[str, object]:
    return {"activity": "joining its gang", "is_loaded": True, "is_joined": True}


def waits(n: int) -> dict[str, object]:
    return {"activity": "waiting for its gang", "is_loaded": True}


def lacks_weights(n: int) -> dict[str, object]:
    """Report missing weights for longer than START_S, then load."""
    waits = {
        "activity": "importing torch",
        "wait_reason": "not loading: other weights" if n > 2 else "",
    }
    return waits if n < 2 * START_S / TICK_S else moves(n)


def serves(n: int) -> dict[str, object]:
    return {"is_loaded": True, "is_joined": True, "info": INFO}


def stopped_at_once(n: int) -> dict[str, object] | None:
    return waits(n) if n < 5 else None


def stops_as_it_loads(n: int) -> dict[str, object] | None:
    return moves(n) if n < 5 else None


async def leaves() -> None:
    return None


def falls_silent(n: int) -> dict[str, object] | None:
    return serves(n) if n < 3 else None


@pytest.mark.parametrize(
    ("says", "lost", "text"),
    [
        ((hangs,), {0}, "d: waiting for process 4711, which compiles kernels: no progress"),
        ((silent,), {0}, "d: starting its process, but it does not answer: no progress for 0.3 s"),
        ((moves, hangs), {1}, "d.1: waiting for process 4711"),
        ((waits, silent), {1}, "d.1: starting its process"),
        ((joins, stopped), {1}, "d.1: joining its gang, but it does not answer: 5 status calls"),
        ((joins, stopped_at_once), {1}, "d.1: waiting for its gang, but it does not answer"),
        ((joins, joins), {0, 1}, "d.0: joining its gang: no progress"),
        ((waits, stopped_at_once), {1}, "d.1: waiting for its gang, but it does not answer"),
        ((waits, stops_as_it_loads), {1}, "d.1: loading weights, 0%, but it does not answer"),
    ],
)
async def test_who_does_not_get_on_is_lost(
    says: tuple[Callable[[int], dict[str, object] | None], ...],
    lost: set[int],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EpochOver, match=text) as over:
        await asked(rank_group(*says), 10, monkeypatch)
    assert over.value.lost_ranks == lost and isinstance(over.value.cause, RankLost)


@pytest.mark.parametrize(
    "says",
    [
        (moves,),
        (moves, waits),
        (serves, serves),
        (serves, falls_silent),
        (lacks_weights,),
        (lacks_weights, waits),
    ],
)
async def test_who_gets_on_waits_for_others_or_serves_is_left_alone(
    says: tuple[Callable[[int], dict[str, object] | None], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that makes progress, waits for others or serves is not lost. A ready one may be
    silent."""
    await asked(rank_group(*says), 4 * START_S, monkeypatch)


async def test_who_falls_silent_between_two_lives_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent rank that was ready and left is lost between two epochs. One that has never answered
    may take longer."""
    monkeypatch.setattr(
        "tandem.cluster.control.rank_group.time", SimpleNamespace(monotonic=lambda: 0.0)
    )
    ranks = rank_group(lambda n: serves(n) if n == 1 else None, silent)
    monkeypatch.setattr(ranks.handles[0], "leave", leaves, raising=False)
    for _ in range(3):
        await ranks.poll_states(SEEN)
    ranks.states = {}
    await ranks._leave_epoch(0)
    for _ in range(MAX_UNANSWERED - 1):
        await ranks.poll_states(SEEN)
    text = "d.0: starting its process, but it does not answer: 5 status calls"
    with pytest.raises(EpochOver, match=text) as over:
        await ranks.poll_states(SEEN)
    assert over.value.lost_ranks == {0}


async def test_who_is_begun_anew_says_what_it_says_for_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first report of a restarted rank counts as new, although its predecessor reported the
    same long before and then served."""
    ranks = rank_group(lambda n: hangs(n) if n < 3 else serves(n))
    await asked(ranks, 2 * START_S, monkeypatch)
    ranks.kill([0])
    ranks.handles = rank_group(hangs).handles
    await asked(ranks, START_S / 2, monkeypatch, from_s=2 * START_S)
    with pytest.raises(EpochOver):
        await asked(ranks, 2 * START_S, monkeypatch, from_s=2.5 * START_S)


async def test_who_has_said_nothing_is_not_taken_for_who_was_there_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service of its predecessor does not excuse a rank that never answers."""
    ranks = rank_group(serves)
    await asked(ranks, START_S / 2, monkeypatch)
    ranks.kill([0])
    ranks.handles = rank_group(silent).handles
    with pytest.raises(EpochOver, match="starting its process"):
        await asked(ranks, 2 * START_S, monkeypatch, from_s=START_S / 2)


async def test_each_rank_tells_what_it_does() -> None:
    ranks = rank_group(lambda n: {"activity": LOADING, "progress": 0.4}, silent)
    assert ranks.startup_notes == ("d.0: starting its process", "d.1: starting its process")
    await ranks.poll_states(SEEN)
    assert ranks.startup_notes[0] == "d.0: loading weights, 40%"
    assert ranks.startup_notes[1] == "d.1: starting its process, but it does not answer"
    ready = rank_group(serves)
    await ready.poll_states(SEEN)
    assert ready.startup_notes == ()


class FakeMembers:
    """Returns one snapshot after another."""

    def __init__(self, *snapshots: tuple[Gang, ...]) -> None:
        self.membership, *self._left = [
            Membership((1, i), gangs) for i, gangs in enumerate(snapshots)
        ]

    async def wait_for_change(self, after: tuple[int, int]) -> Membership:
        return self._left.pop(0)


READY_P = Gang("prefill-0", "prefill", 5, READY, (INFO,))
DIED = {"failure": Failure("RankLost", "it died\nlog"), "is_given_up": False}


async def waited(*lives: Gang) -> list[str]:
    """Return the messages that are shown until the cluster can serve."""
    told: list[str] = []
    members: Any = FakeMembers(*((READY_P, life) for life in lives))
    await RayMembers.wait_until_started(members, told.append)
    return told


def of_decode(state: str, **fields: Any) -> Gang:
    return Gang("decode-0", "decode", 6, state, **fields)


async def test_serve_tells_what_it_waits_for() -> None:
    told = await waited(
        of_decode(STARTING, startup_notes=("decode-0: waiting for resources",)),
        of_decode(LOST, **DIED),
        of_decode(STARTING, startup_notes=("decode-0: loading weights, 40%",), **DIED),
        of_decode(READY, **DIED),
    )
    assert told == [
        "decode-0: waiting for resources",
        "decode-0: lost; last epoch ended: it died",
        "decode-0: loading weights, 40%",
    ]


@pytest.mark.parametrize("state", [LOST, DOWN])
async def test_serve_ends_with_what_keeps_a_gang_from_starting(state: str) -> None:
    last = of_decode(state, **(DIED | {"is_given_up": True}))
    with pytest.raises(RankLost, match="it died\nlog"):
        await waited(of_decode(STARTING), of_decode(LOST, **DIED), last)


def test_slow_kernels_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = replace(INFO, fallback_reason="native kernels cannot be used: no C++ compiler")
    _log_notices([INFO, plain, plain])
    [told] = caplog.messages
    assert told.startswith("steps are slower") and told.endswith("no C++ compiler")
    _log_notices([INFO])
    assert len(caplog.messages) == 1


async def test_who_attaches_does_not_wait_for_a_gang_whose_kind_is_there() -> None:
    """A server does not wait for a lost gang if another gang of its kind is ready. The lost one may
    wait for resources for long."""
    other = Gang(
        "decode-1",
        "decode",
        7,
        STARTING,
        startup_notes=("decode-1: waiting for resources",),
        **DIED,
    )
    told: list[str] = []
    members: Any = FakeMembers((READY_P, of_decode(READY), other))
    await RayMembers.wait_until_started(members, told.append)
    assert told == ["decode-1: waiting for resources"]
