"""Only reports about a rank decide whether it gets requests. Users of a rank are notified of its
end. Releases that it was sent outlive the answer, but not the gateway."""

import asyncio
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.gateway import fleet
from tandem.cluster.gateway.fleet import Fleet
from tandem.cluster.gateway.liveness import Liveness, LivenessEvent, LivenessPhase, next_phase
from tandem.core.config import load
from tandem.core.control import Empty
from tandem.core.errors import RankDied, RankLost
from tandem.core.heartbeat import Heartbeat, RankLoad
from tandem.core.identity import Identity
from tandem.core.info import DECODE, PREFILL
from tandem.core.membership import DRAINING, LOST, READY, Gang, Membership
from tandem.core.progress import EngineProgress
from tandem.core.schema import pack
from tests.rig import LocalMembers
from tests.unit.test_membership import INFO
from tests.waiting import PATIENCE_S, for_ever, turns, until

TOLD = (
    LivenessEvent.HEARTBEAT,
    LivenessEvent.LOST,
    LivenessEvent.CALL_FAILED,
    LivenessEvent.CALL_ANSWERED,
)
NEXT = {
    LivenessPhase.SILENT: (
        LivenessPhase.READY,
        LivenessPhase.OUT,
        LivenessPhase.SILENT,
        LivenessPhase.SILENT,
    ),
    LivenessPhase.READY: (
        LivenessPhase.READY,
        LivenessPhase.OUT,
        LivenessPhase.SUSPECT,
        LivenessPhase.READY,
    ),
    LivenessPhase.SUSPECT: (
        LivenessPhase.SUSPECT,
        LivenessPhase.OUT,
        LivenessPhase.SUSPECT,
        LivenessPhase.READY,
    ),
    LivenessPhase.OUT: (
        LivenessPhase.READY,
        LivenessPhase.OUT,
        LivenessPhase.OUT,
        LivenessPhase.OUT,
    ),
}


@pytest.mark.parametrize(("phase", "is_draining"), product(LivenessPhase, (False, True)))
def test_the_next_state(phase: LivenessPhase, is_draining: bool) -> None:
    assert tuple(next_phase(phase, event) for event in TOLD) == NEXT[phase]
    rank = Liveness("d")
    rank.phase, rank.is_draining = phase, is_draining
    assert rank.is_well == (phase is LivenessPhase.READY and not is_draining)
    assert rank.is_out == (phase in (LivenessPhase.SUSPECT, LivenessPhase.OUT))
    for event in LivenessEvent:
        rank.apply_event(event)
        assert rank.is_draining == is_draining, "no event says anything of that"


@given(st.lists(st.sampled_from(LivenessEvent)), st.integers(1, 5))
def test_an_accusation_is_refuted_by_an_answer_not_by_heartbeats(
    events: list[LivenessEvent], num: int
) -> None:
    anew = reduce(
        next_phase, [*events, LivenessEvent.LOST, LivenessEvent.HEARTBEAT], LivenessPhase.SILENT
    )
    assert anew is LivenessPhase.READY
    accused = reduce(
        next_phase, [LivenessEvent.CALL_FAILED, *[LivenessEvent.HEARTBEAT] * num], anew
    )
    assert (
        accused is LivenessPhase.SUSPECT
        and next_phase(accused, LivenessEvent.CALL_ANSWERED) is anew
    )


async def test_it_is_told_lost_once_and_back_once() -> None:
    rank = Liveness("d")
    assert not rank.apply_event(LivenessEvent.HEARTBEAT) and rank.answering.is_set(), (
        "it was never out"
    )
    assert rank.apply_event(LivenessEvent.CALL_FAILED) and rank.answering.is_set()
    assert not rank.mark_lost(RankLost("silent")) and not rank.answering.is_set(), (
        "it was out already"
    )
    assert rank.apply_event(LivenessEvent.HEARTBEAT) and rank.is_well
    assert rank.mark_lost(RankLost("again"))


async def test_who_needs_it_ends_with_what_ended_it() -> None:
    rank = Liveness("d")

    async def need() -> None:
        async with rank.cancelled_if_lost():
            await asyncio.Event().wait()

    needing = [asyncio.create_task(need()) for _ in range(2)]
    await turns()
    rank.apply_event(LivenessEvent.HEARTBEAT)
    rank.apply_event(LivenessEvent.CALL_FAILED)
    await turns()
    assert not any(task.done() for task in needing), "heartbeats alone say that it has ended"
    rank.mark_lost(RankDied("its process has ended"))
    errors = await asyncio.gather(*needing, return_exceptions=True)
    for error in errors:
        assert isinstance(error, RankDied) and error.rank == "d"
    assert errors[0] is not errors[1]
    with pytest.raises(TimeoutError):
        async with rank.cancelled_if_lost():
            raise TimeoutError("the body's own")


class Slow:
    """A rank's control interface whose calls block until ``may_go`` is set."""

    def __init__(self) -> None:
        self.is_asked, self.may_go = asyncio.Event(), asyncio.Event()

    async def call(self, method: str, payload: bytes) -> bytes:
        if method == "heartbeat":
            return pack(Heartbeat(EngineProgress(0, 0.0, 60.0), RankLoad()))
        self.is_asked.set()
        await self.may_go.wait()
        return pack(Empty())


async def test_a_gateway_that_stops_finishes_its_releases(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STOP_RELEASE_S", PATIENCE_S)
    members, slow, info = LocalMembers(), Slow(), replace(INFO, frames=None)
    spec = info.spec
    members.controls[spec.epoch_name] = slow
    members.tell(Gang(spec.gang, spec.kind, spec.epoch, READY, (info,)))

    async def warm(pair: object) -> None:
        """Do nothing, as there is no pair of ranks."""

    owner = Fleet(members, load(None, [f"model.path={small_model}"]), warm)
    release = owner.ranks[spec.epoch_name].release("abort", Identity("r"))
    await slow.is_asked.wait()
    stopping = asyncio.create_task(owner.stop())
    await turns()
    assert not stopping.done()
    slow.may_go.set()
    await stopping
    assert release.result() == Empty()


async def test_a_pair_that_joins_and_cannot_work_together_is_told(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members, there = LocalMembers(), replace(INFO, frames=None)
    infos = [
        replace(there, spec=replace(there.spec, gang=kind, kind=kind)) for kind in (PREFILL, DECODE)
    ]
    for info in infos:
        members.controls[info.spec.epoch_name] = Slow()
    members.tell(*(Gang(i.spec.gang, i.spec.kind, 5, READY, (i,)) for i in infos))

    async def warm(pair: object) -> None:
        raise ValueError("prompts of two tokens do not fit")

    owner = Fleet(members, load(None, [f"model.path={small_model}"]), warm)
    for rank in owner.ranks.values():
        rank.liveness.apply_event(LivenessEvent.HEARTBEAT)
    await until(lambda: "failed: prompts of two tokens" in caplog.text)
    await owner.stop()


async def test_who_drains_no_more_gets_requests(small_model: Path) -> None:
    """A rank that drained and is ready again gets requests. The controller that drained it may have
    died, and its successor finds the rank ready."""
    members, info = LocalMembers(), replace(INFO, frames=None)
    spec = info.spec
    members.controls[spec.epoch_name] = Slow()
    gang = Gang(spec.gang, spec.kind, spec.epoch, READY, (info,))
    members.tell(gang)

    async def warm(pair: object) -> None:
        """Do nothing, as there is no pair of ranks."""

    owner = Fleet(members, load(None, [f"model.path={small_model}"]), warm)
    rank = owner.ranks[spec.epoch_name].liveness
    await until(lambda: rank.is_well)
    members.tell(replace(gang, state=DRAINING))
    await until(lambda: not rank.is_well)
    members.tell(gang)
    await until(lambda: rank.is_well)
    await owner.stop()


class FailingMembers(LocalMembers):
    """Raises once while a gateway follows the membership."""

    num_failures = 1

    async def wait_for_change(self, after_version: tuple[int, int]) -> Membership:
        now = await super().wait_for_change(after_version)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("Event loop is closed")
        return now


async def test_an_error_does_not_end_the_following_of_membership(tmp_path: Path) -> None:
    members = FailingMembers()
    fleet = Fleet(members, load(None, [f"model.path={tmp_path}"]), lambda pair: for_ever())
    members.tell(Gang("decode-0", DECODE, 1, LOST))
    await until(lambda: fleet.membership.version == members.membership.version)
    assert not members.num_failures
    members.tell()
    await until(lambda: fleet.membership.version == members.membership.version)
    await fleet.stop()
