"""Recovery of one answer when ranks are lost or hand-overs fail: it waits or migrates."""

import asyncio
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from tandem.cluster.gateway import recovery
from tandem.cluster.gateway.liveness import LivenessPhase
from tandem.cluster.gateway.recovery import MAX_FATAL_STEPS
from tandem.core.control import Control
from tandem.core.errors import HandoverError, PoisonRequest, RankDied, RankLost
from tandem.core.identity import Identity
from tandem.core.membership import EpochEnd, InFlightBatch, RankSpec
from tandem.core.schema import encode_failure, unpack
from tandem.decode_node.service.decode_calls import StartSequence
from tandem.prefill_node.prefill_calls import Prefill
from tests.gates import Gate, are_active
from tests.integration.test_lost_prefill import prompts
from tests.rig import Rig, rig
from tests.waiting import until

SETS = ("kv.num_pages=300", "kv.page_size=16")


class Refusing:
    """A decode rank's control connection that fails every hand-over."""

    def __init__(self, control: Control) -> None:
        self.num_refused = 0
        self._control = control

    async def call(self, method: str, payload: bytes) -> bytes:
        if method != "start":
            return await self._control.call(method, payload)
        self.num_refused += 1
        return encode_failure(HandoverError("its wire is broken"))


async def test_a_pair_that_failed_a_request_is_not_tried_with_it_again(small_model: Path) -> None:
    """Retries of that pair would use up the request's failures, though another pair works."""
    async with rig(small_model, *SETS, "decode.replicas=2") as cluster:
        first = cluster.decodes[0]
        handle = cluster.gateway.fleet.ranks[first.spec.epoch_name]
        handle.control = broken = Refusing(handle.control)
        asked = [greedy(f"r{i}", ids, 12, ignore_eos=True) for i, ids in enumerate(prompts(4, 3))]
        for request in asked:
            ids, _, _ = await cluster.complete(request)
            assert len(ids) == 12
            assert not near_ties(small_model, list(request.prompt_ids), ids)
        assert 1 <= broken.num_refused <= len(asked), "at most once for each request"
        await cluster.check_empty()


class Dying:
    """Control connection of a prefill rank whose first prefills die.

    Its ping fails too until ``is_back``. Heartbeats are answered all the time.
    """

    def __init__(self, control: Control, num_deaths: int = 1) -> None:
        self.asked: list[Prefill] = []
        self.is_back = False
        self._num_deaths = num_deaths
        self._control = control

    async def call(self, method: str, payload: bytes) -> bytes:
        if method == "prefill":
            self.asked.append(unpack(Prefill, payload))
        if (method == "prefill" and len(self.asked) <= self._num_deaths) or (
            method == "ping" and not self.is_back
        ):
            raise RankDied("its process has ended")
        return await self._control.call(method, payload)


@pytest.mark.parametrize("is_in_step", [True, False], ids=["in the step", "another was"])
async def test_a_death_that_a_call_learns_of_first_names_suspects_too(
    small_model: Path, is_in_step: bool
) -> None:
    """The last heartbeat was fine, and the verdict comes a little later.

    The verdict names only the request that was in the step. Other requests of the rank are not
    suspected, even if that request was alone in its step.
    """
    async with rig(small_model, *SETS) as cluster:
        spec = cluster.prefills[0].spec
        handle = cluster.gateway.fleet.ranks[spec.epoch_name]
        handle.control = dying = Dying(handle.control)
        request = greedy("r", prompts(1, 6)[0], 12, ignore_eos=True)
        running = asyncio.create_task(cluster.complete(request))
        await until(lambda: handle.liveness.phase is LivenessPhase.SUSPECT)
        guilty = dying.asked[0].identity if is_in_step else Identity("another")
        tell_death(cluster, spec, InFlightBatch((guilty,), not is_in_step))
        dying.is_back = True
        ids, _, _ = await running
        assert len(ids) == 12 and not near_ties(small_model, list(request.prompt_ids), ids)
        assert [asked.is_suspect for asked in dying.asked] == [False, is_in_step]
        await cluster.check_empty()


async def test_who_is_no_member_any_more_is_neither_reported_nor_asked(small_model: Path) -> None:
    """The gateway knows that the rank's epoch is over. Answers that ran there migrate."""
    async with rig(small_model, *SETS, "decode.replicas=2") as cluster:
        gates = [Gate(decode) for decode in cluster.decodes]
        request = greedy("r", prompts(1, 6)[0], 12, ignore_eos=True)
        running = asyncio.create_task(cluster.complete(request))
        await until(lambda: any(are_active(decode, 1) for decode in cluster.decodes))
        [busy] = [decode for decode in cluster.decodes if are_active(decode, 1)]
        cluster.members.remove(busy.spec.epoch_name)
        await until(lambda: busy.spec.epoch_name not in cluster.gateway.fleet.ranks)
        for gate in gates:
            gate.open()
        ids, _, _ = await running
        assert len(ids) == 12 and not near_ties(small_model, list(request.prompt_ids), ids)
        assert not cluster.members.reports
        kept = cluster.gateway.fleet
        asked = {rank.epoch_name for rank in (*kept._listeners, *chain(*kept._warm_ups))}
        assert busy.spec.epoch_name not in asked and not len(kept._background)
        await cluster.check_empty()


async def test_nobody_waits_to_be_told_what_a_rank_died_of(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the dead rank migrates at once as a suspect. If its second rank dies too, it
    waits for the cause."""
    monkeypatch.setattr(recovery, "CAUSE_TIMEOUT_S", 3600.0)
    async with rig(small_model, *SETS, "prefill.replicas=2") as cluster:
        dying = []
        for rank in cluster.prefills:
            handle = cluster.gateway.fleet.ranks[rank.spec.epoch_name]
            handle.control = control = Dying(handle.control)
            dying.append(control)
        request = greedy("r", prompts(1, 6)[0], 12, ignore_eos=True)
        running = asyncio.create_task(cluster.complete(request))
        await until(lambda: all(one.asked for one in dying))
        first, second = sorted(dying, key=lambda one: one.asked[0].is_suspect)
        assert not first.asked[0].is_suspect and second.asked[0].is_suspect
        for rank in cluster.prefills:
            tell_death(cluster, rank.spec, InFlightBatch((Identity("another"),), True))
        second.is_back = first.is_back = True
        ids, _, _ = await running
        assert len(ids) == 12 and not near_ties(small_model, list(request.prompt_ids), ids)
        assert [asked.is_suspect for one in dying for asked in one.asked[1:]] == [False]
        await cluster.check_empty()


def tell_death(cluster: Rig, spec: RankSpec, in_step: InFlightBatch) -> None:
    """Report the controller's verdict on a rank, which in this test is still running."""
    ended = EpochEnd(spec.epoch, in_step)
    gangs = cluster.members.membership.gangs
    cluster.members.tell(
        *(replace(g, epoch_end=ended) if g.name == spec.gang else g for g in gangs)
    )


@pytest.mark.parametrize("is_isolated", [False, True], ids=["among others", "alone"])
async def test_a_verdict_that_comes_late_still_marks_its_answers(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, is_isolated: bool
) -> None:
    """The gateway retries without waiting for a late verdict.

    The second attempt is not marked as suspect; the next one is, though the second death has no
    known cause. A request that was alone in its second fatal step is refused.
    """
    monkeypatch.setattr(recovery, "CAUSE_TIMEOUT_S", 0.0)
    async with rig(small_model, *SETS) as cluster:
        spec = cluster.prefills[0].spec
        handle = cluster.gateway.fleet.ranks[spec.epoch_name]
        handle.control = dying = Dying(handle.control, num_deaths=3 if is_isolated else 2)
        dying.is_back = True
        request = greedy("r", prompts(1, 6)[0], 12, ignore_eos=True)
        running = asyncio.create_task(cluster.complete(request))
        await until(lambda: len(dying.asked) == 2)
        tell_death(cluster, spec, InFlightBatch((dying.asked[0].identity,), False))
        if is_isolated:
            await until(lambda: bool(cluster.gateway.fleet.fatal_steps))
            tell_death(cluster, spec, InFlightBatch((dying.asked[1].identity,), True))
            with pytest.raises(PoisonRequest):
                await running
        else:
            ids, _, _ = await running
            assert len(ids) == 12 and not near_ties(small_model, list(request.prompt_ids), ids)
        told = [asked.is_suspect for asked in dying.asked]
        assert told[:2] == [False, False] and all(told[2:]) and (is_isolated or len(told) == 3)
        await cluster.check_empty()


class Deadly:
    """A decode rank's control connection that dies in each step of a sequence.

    The death is reported with all requests of that step. By then the first token, from prefill, has
    arrived.
    """

    def __init__(self, control: Control, cluster: Rig) -> None:
        self.num_deaths = 0
        self._control = control
        self._cluster = cluster

    async def call(self, method: str, payload: bytes) -> bytes:
        answer = await self._control.call(method, payload)
        if method == "start":
            self.num_deaths += 1
            in_step = InFlightBatch(
                (unpack(StartSequence, payload).identity, Identity("other")), False
            )
            tell_death(self._cluster, self._cluster.decodes[0].spec, in_step)
            raise RankDied("its process has ended")
        return answer


async def test_deaths_count_for_an_answers_whole_life(small_model: Path) -> None:
    """Deaths count even if a token arrives between any two of them."""
    async with rig(small_model, *SETS) as cluster:
        handle = cluster.gateway.fleet.ranks[cluster.decodes[0].spec.epoch_name]
        handle.control = deadly = Deadly(handle.control, cluster)
        with pytest.raises(PoisonRequest, match="in 3 steps that killed a rank"):
            await cluster.complete(greedy("r", prompts(1, 6)[0], 40, ignore_eos=True))
        assert deadly.num_deaths == MAX_FATAL_STEPS
        await cluster.check_empty()


async def lose_the_only_decode_rank(cluster: Rig, request_id: str) -> "asyncio.Task[list[int]]":
    """Return the task of an answer that had started on that rank."""
    [decode] = cluster.decodes
    told = asyncio.Event()

    async def ask() -> list[int]:
        ids: list[int] = []
        request = greedy(request_id, prompts(1, 4)[0], 200, ignore_eos=True)
        async for piece in cluster.generate(request):
            ids += getattr(piece, "token_ids", ())
            told.set()
        return ids

    running = asyncio.create_task(ask())
    await told.wait()
    cluster.members.remove(decode.spec.epoch_name)
    return running


async def test_a_begun_answer_waits_for_a_rank_and_a_new_one_does_not(small_model: Path) -> None:
    async with rig(small_model, *SETS, "server.recovery_timeout_s=60") as cluster:
        [decode] = cluster.decodes
        running = await lose_the_only_decode_rank(cluster, "begun")
        new = greedy("new", prompts(1, 5)[0], 8)
        for asked in (new, replace(new, output_ids=(5,))):
            with pytest.raises(RankLost):
                await cluster.complete(asked)
        assert not running.done()
        cluster.members.add(decode)
        ids = await running
        assert len(ids) == 200 and not near_ties(small_model, prompts(1, 4)[0], ids)
        await cluster.check_empty()


async def test_patience_ends(small_model: Path) -> None:
    async with rig(small_model, *SETS, "server.recovery_timeout_s=0.2") as cluster:
        running = await lose_the_only_decode_rank(cluster, "begun")
        with pytest.raises(RankLost):
            await running
        cluster.members.add(cluster.decodes[0])
        await until(cluster.gateway.is_healthy)
        await cluster.check_empty()
