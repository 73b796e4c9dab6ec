"""Adoption of ranks by a controller, differences between configs, and the states that a rank's
shell reports."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.control.gang_supervisor import EpochCounter
from tandem.cluster.control.plan import adoptable_ranks, is_complete, plan_gangs
from tandem.core.config import TandemConfig, load
from tandem.core.config_shared import config_differences
from tandem.core.errors import RankLost
from tandem.core.info import ModelInfo
from tandem.core.membership import (
    Gang,
    Membership,
    PortAddress,
    RankInfo,
    RankSpec,
    RankState,
    Rendezvous,
)
from tandem.core.progress import LOADING
from tandem.core.schema import Failure, decode, pack, unpack
from tandem.runtime.engine_loop import EngineLoop
from tandem.runtime.rank_actor import RankActor
from tests.waiting import turns, until

MODEL = ModelInfo("tiny", "deepseek_v3", 9, 9, (1,), 3, True, "float32")
SPEC = RankSpec("decode-0", "decode", 5)
INFO = RankInfo(SPEC, ("f",), "none", MODEL, 9, 9, PortAddress("h", 1, b"secret"))


def state(gang: str, epoch: int, rank: int = 0, num_ranks: int = 1, **fields: Any) -> RankState:
    spec = RankSpec(gang, gang.partition("-")[0], epoch, rank, num_ranks)
    return RankState(spec, fields.pop("config", "{}"), 1, "", (0, epoch), **fields)


def names(states: list[RankState]) -> list[list[str]]:
    return [[state.spec.epoch_name for state in gang] for gang in adoptable_ranks(states).values()]


def test_what_lives_of_gangs_is_adopted_in_the_order_of_ranks() -> None:
    found = [state("decode-0", 4, 1, 2), state("prefill-0", 3), state("decode-0", 4, 0, 2)]
    assert names(found) == [["prefill-0.3.0"], ["decode-0.4.0", "decode-0.4.1"]]
    assert all(map(is_complete, adoptable_ranks(found).values()))


def test_survivors_and_newcomers_are_adopted_together() -> None:
    """A controller died while it replaced one of two ranks; its successor adopts both."""
    survivor, newcomer = state("decode-0", 4, 0, 2), state("decode-0", 7, 1, 2)
    newcomer = replace(newcomer, spec=replace(newcomer.spec, placement_group_epoch=4))
    assert names([newcomer, survivor]) == [["decode-0.4.0", "decode-0.7.1"]]
    assert names([survivor]) == [["decode-0.4.0"]]
    assert not is_complete([survivor, newcomer]) and not is_complete([survivor])


def test_who_has_failed_is_not_adopted() -> None:
    assert names([state("prefill-0", 3, failure=Failure("ValueError", "no"))]) == []
    assert names([]) == []


def test_the_later_room_and_process_and_the_latest_config_count() -> None:
    assert names([state("decode-0", 9), state("decode-0", 4)]) == [["decode-0.9.0"]]
    stale = state("prefill-0", 3, config='{"mode": "disaggregated"}')
    assert names([stale, state("decode-0", 4)]) == [["decode-0.4.0"]]
    again = state("decode-0", 9, 1, 2)
    again = replace(again, spec=replace(again.spec, placement_group_epoch=4))
    found = [again, state("decode-0", 4, 1, 2), state("decode-0", 4, 0, 2)]
    assert names(found) == [["decode-0.4.0", "decode-0.9.1"]]


def test_a_config_asks_for_its_gangs() -> None:
    plans = plan_gangs(load(None, ["prefill.replicas=2", "decode.num_threads=3"]))
    assert [(plan.name, plan.resources["CPU"]) for plan in plans] == [
        ("prefill-0", 1), ("prefill-1", 1), ("decode-0", 3),
    ]  # fmt: skip
    plans = plan_gangs(load(None, ["mode=colocated", "decode.replicas=2"]))
    assert [(plan.name, plan.kind) for plan in plans] == [
        ("colocated-0", "colocated"), ("colocated-1", "colocated"),
    ]  # fmt: skip


def test_differing_keys_are_named_with_both_values() -> None:
    mine = load(None, ["decode.max_num_seqs=4", "server.max_queued=9"])
    assert config_differences(mine, load(None, ["decode.max_num_seqs=4"])) == []
    found = config_differences(mine, load(None, ["kv.page_size=16"]))
    assert found == [
        "decode.max_num_seqs is 16, but 4 in the cluster",
        "kv.page_size is 16, but 64 in the cluster",
    ]


@pytest.mark.parametrize("behind_s", [0, 60], ids=["within a second", "the clock was set back"])
def test_every_life_has_an_epoch_of_its_own(behind_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = EpochCounter()
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    epochs.seen = 3, 0
    assert epochs.next_epoch() == 1_000_500
    epochs.seen = 3, 1_000_500 + behind_s
    assert [epochs.next_epoch() - behind_s for _ in range(3)] == [1_000_501, 1_000_502, 1_000_503]


def test_a_cluster_after_another_was_stopped_has_other_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cluster that starts after another was stopped has other epochs. No state names the used
    ones, and many gangs had started at once."""
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    first = EpochCounter()
    last = [first.next_epoch() for _ in range(64)][-1]
    now += 1.0
    assert EpochCounter().next_epoch() > last


def test_a_snapshot_travels_whole() -> None:
    gangs = (
        Gang("decode-0", "decode", 5, "ready", (INFO,)),
        Gang("prefill-0", "prefill", 6, "down", failure=Failure("RankLost", "it died")),
    )
    sent = Membership((3, 4), gangs, "d1", proof_key=b"\x00\xff secret")
    got = unpack(Membership, pack(sent))
    assert got == sent and got.ready() == [INFO]
    assert got.gangs[1].failure == Failure("RankLost", "it died")


class FakeShell(RankActor):
    """``made`` is the rank to load, or the error that loading it raises."""

    made: Any = None
    num_loads = 0

    async def load(self, spec: RankSpec, config: TandemConfig) -> Any:
        self.num_loads += 1
        self._on_start(LOADING, 0.25)
        await turns()
        if isinstance(self.made, Exception):
            raise self.made

    async def start_epoch(self, spec: RankSpec, memory: Any, rendezvous: Rendezvous | None) -> Any:
        return self.made


def shell(made: Any) -> FakeShell:
    made_shell = FakeShell(pack(SPEC), load().model_dump_json())
    made_shell.made = made
    return made_shell


async def ended(one: RankActor, *numbers: int) -> RankState:
    found = unpack(RankState, await one.get_state(*numbers))

    async def has_ended() -> bool:
        nonlocal found
        found = unpack(RankState, await one.get_state(*numbers))
        is_loading = (found.activity, found.progress) == (LOADING, 0.25)
        assert found.info or found.failure or is_loading or found.activity == "importing torch"
        return bool(found.info or found.failure)

    await until(has_ended)
    return found


async def test_a_shell_answers_from_the_start() -> None:
    stops = []

    async def handle(epoch: int, method: str, payload: bytes) -> bytes:
        return f"{epoch} {method}".encode() + payload

    async def stop() -> None:
        stops.append("stopped")

    loop = EngineLoop("never started")
    rank = SimpleNamespace(info=INFO, loop=loop, handle=handle, stop=stop, num_sequences=3)
    one = shell(rank)
    first = unpack(RankState, await one.get_state())
    assert (
        first.info is None and first.max_seen == (0, 5) and first.spec.epoch_name == "decode-0.5.0"
    )
    with pytest.raises(RankLost, match=r"decode-0\.5\.0 is not ready"):
        decode(Failure, await one.call(5, "status", b""))
    ready = await ended(one, 8, 3)
    assert (ready.max_seen, ready.info, ready.failure) == ((8, 5), INFO, None)
    assert one.num_loads == 1, "whoever asks and how often"
    assert "secret" not in repr(ready)
    assert await one.call(4, "status", b"!") == b"4 status!", "the rank checks the epoch"
    loop.failure = ValueError("cosmic ray")
    failed = unpack(RankState, await one.get_state())
    assert failed.failure == Failure(
        "StepFailed", "decode-0.5.0: the engine stopped: ValueError('cosmic ray')"
    )
    await one.stop()
    assert stops == ["stopped"]
    assert unpack(RankState, await one.get_state(2, 99)).max_seen == (8, 99)


class Hanging:
    """An engine whose step does not end until ``go_on`` is set."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def has_work(self) -> bool:
        return not self.go_on.is_set()

    def step(self) -> None:
        self.entered.set()
        self.go_on.wait()

    def fail(self, error: Exception) -> None:
        raise error

    def close(self) -> None:
        pass


async def test_a_rank_whose_engine_thread_hangs_joins_no_other_life() -> None:
    """A rank whose engine thread hangs joins no other epoch, because two engines would use one
    cache."""
    engine, loop = Hanging(), EngineLoop("hangs")
    loop.add(engine)

    async def stop() -> None:
        await asyncio.to_thread(loop.stop, 0.01)

    one = shell(SimpleNamespace(info=INFO, loop=loop, stop=stop, num_sequences=0))
    await ended(one)
    loop.start()
    await asyncio.to_thread(engine.entered.wait)
    again = pack(replace(SPEC, epoch=6)), pack(Rendezvous("h", 1, 2, b"token"))
    for call in (one.leave, one.open_rendezvous, lambda: one.join(*again)):
        with pytest.raises(RankLost, match=r"decode-0\.5\.0: the engine did not stop"):
            await call()
    engine.go_on.set()
    loop.stop()
    await one.join(*again)
    assert unpack(RankState, await one.get_state()).spec.epoch == 6
    await one.leave()


async def test_two_controllers_may_have_a_rank_leave_at_once() -> None:
    """Two controllers may make a rank leave at once: the first died while it waited, and the second
    adopts the rank."""
    may_end, stops = asyncio.Event(), []

    async def stop() -> None:
        stops.append("stopped")
        await may_end.wait()

    loop = SimpleNamespace(
        is_running=False,
        failure=None,
        stall_detector=SimpleNamespace(measure_progress=lambda: None),
    )
    one = shell(SimpleNamespace(info=INFO, loop=loop, stop=stop, num_sequences=0))
    await ended(one)
    leaving = [asyncio.create_task(one.leave()) for _ in range(2)]
    await turns()
    may_end.set()
    await asyncio.gather(*leaving)
    assert stops == ["stopped"] and not unpack(RankState, await one.get_state()).is_joined


async def test_a_rank_that_was_told_to_stop_goes_on_under_no_other_controller() -> None:
    """A rank that was stopped is not adopted by another controller. It still answers calls if the
    stopping controller died before the rank's process did."""
    told: list[RankState] = []

    async def stop() -> None:
        told.append(unpack(RankState, await one.get_state()))

    one = shell(
        SimpleNamespace(info=INFO, loop=EngineLoop("never started"), stop=stop, num_sequences=0)
    )
    assert adoptable_ranks([await ended(one)])
    await one.stop()
    told.append(unpack(RankState, await one.get_state()))
    for said in told:
        assert said.failure == Failure("RankLost", "decode-0.5.0 was stopped")
    assert not adoptable_ranks(told[:1]) and not adoptable_ranks(told[1:])


async def test_a_shell_tells_why_it_failed() -> None:
    one = shell(ValueError("model.path: no such folder"))
    found = await ended(one)
    assert found.failure == Failure("ValueError", "model.path: no such folder")
    assert found.info is None
    await one.stop()
