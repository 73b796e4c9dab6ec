"""An error on one rank of a gang in a step leaves the other ranks alone, or ends the epoch."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from tandem.core.errors import EpochEnded, HandoverError, ProgramFailed, RankLost, StepFailed
from tandem.core.request import Request, SamplingParams
from tandem.decode_node.planning.step_plan import StepKey, StepPlan
from tandem.decode_node.program.programs import PreparedStep, Programs, StepResult
from tandem.decode_node.service.rank import DecodeRank
from tandem.model.kernels.base import Kernels
from tandem.model.kernels.replayable import Function
from tandem.model.network.dispatch.expert_parallel import ExpertParallelDispatch
from tandem.runtime.gang.collectives import Collectives
from tests.integration.test_preemption import watch
from tests.rig import Rig, rig
from tests.waiting import until

SETS = ("prefill.dp_size=2", "decode.dp_size=2", "kv.page_size=8", "server.recovery_timeout_s=0.2")
NUM_TOKENS = 80


def requests(num: int, num_tokens: int = NUM_TOKENS) -> list[Request]:
    return [
        greedy(f"r{i}", list(range(9 * i + 2, 9 * i + 16)), num_tokens, ignore_eos=True)
        for i in range(num)
    ]


@contextlib.asynccontextmanager
async def running(
    cluster: Rig, asked: list[Request]
) -> AsyncIterator[list["asyncio.Task[list[int]]"]]:
    """Run the requests; both ranks decode some of them."""

    async def ids(request: Request) -> list[int]:
        return (await cluster.complete(request))[0]

    tasks = [asyncio.create_task(ids(request)) for request in asked]
    try:
        await until(lambda: all(map(num_active, cluster.decodes)))
        yield tasks
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


def num_active(rank: DecodeRank) -> int:
    return len(rank.engine.scheduler.running)


def names(rank: DecodeRank) -> set[str]:
    return {identity.request_id for identity in list(rank.engine.scheduler.sequences)}


def fail_once(owner: object, method: str, error: Exception) -> Callable[[], bool]:
    """Make the next call of that method raise; return a function that says whether it has."""
    inner, failed = getattr(owner, method), [False]

    def failing(*args: Any, **more: Any) -> Any:
        if not failed[0]:
            failed[0] = True
            raise error
        return inner(*args, **more)

    setattr(owner, method, failing)
    return lambda: failed[0]


class Through:
    """A launcher whose methods can be replaced."""

    def __init__(self, inner: Any) -> None:
        self.prepare, self.launch, self.rows = inner.prepare, inner.launch, inner.rows


def is_exact(small_model: Path, request: Request, ids: list[int]) -> bool:
    return len(ids) == NUM_TOKENS and not near_ties(small_model, list(request.prompt_ids), ids)


async def test_all_ranks_measure_steps_together_before_there_is_work(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks measure with tokens that travel to the other rank's experts, like those of real rows.

    The tokens do not count for expert balancing. After the measurement the ranks park.
    """
    more, here, num_here = (
        ("speculation.profile_at_startup=true", "decode.max_num_seqs=4"),
        ExpertParallelDispatch.local_slots,
        [],
    )

    def watched(self: ExpertParallelDispatch, layer: int, slots_NK: Tensor) -> Tensor:
        local_NK = here(self, layer, slots_NK)
        num_here.append(int((local_NK < self.num_slots).sum()))
        return local_NK

    monkeypatch.setattr(ExpertParallelDispatch, "local_slots", watched)
    async with rig(small_model, *SETS, *more) as cluster:
        ranks = cluster.decodes
        dispatches = [rank.engine._loaded.dispatch for rank in ranks]
        await until(lambda: not any(rank.engine.has_work() for rank in ranks))
        assert ranks[0].engine.num_steps == ranks[1].engine.num_steps > 3 * 4 * 2
        warming = sum(sum(one.num_computed_rows()) for one in dispatches)
        assert warming < 100 < 1000 < sum(num_here)
        for request in requests(3, 20):
            ids, _, _ = await cluster.complete(request)
            near_ties(small_model, list(request.prompt_ids), ids)
        assert sum(sum(one.num_computed_rows()) for one in dispatches) > warming + 100
        await cluster.check_empty()


class Captured:
    """Stands in for a captured graph, which a gang replays only if all ranks do. Ready after two
    calls."""

    def __init__(self, function: Function) -> None:
        self._function, self._num_calls = function, 0

    @property
    def is_ready(self) -> bool:
        return self._num_calls > 1

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self._num_calls += 1
        return self._function(*inputs)

    def forget(self) -> None:
        self._num_calls = 0


class Capturing(Kernels):
    exec_mode, owns_outputs, reads_paged_cache = "captured", True, True

    def make_replayable(self, function: Function) -> Captured:
        return Captured(function)


def keys_of(programs: Programs) -> set[tuple[int, StepKey]]:
    return {(number, key) for number, (key, _) in programs.functions.items()}


async def test_ranks_make_programs_together_and_replay_them_all_or_none(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL's collectives in graphs require this of all ranks, even if the rows of a single rank
    need an eager step."""
    run, ran = Programs.run, dict[Programs, list[StepPlan]]()
    programs, close, left = list[Programs](), Collectives.close, dict[int, int]()

    def closed(self: Collectives) -> None:
        left.setdefault(self.rank, len(programs[self.rank].functions))
        close(self)

    monkeypatch.setattr(Collectives, "close", closed)

    def noted(self: Programs, step: PreparedStep) -> StepResult:
        ran.setdefault(self, []).append(step.plan)
        return run(self, step)

    monkeypatch.setattr(Programs, "run", noted)
    monkeypatch.setattr(ExpertParallelDispatch, "eager_reason", "")
    monkeypatch.setattr("tandem.model.loaded.create_kernels", lambda *asked, **more: Capturing())
    async with rig(small_model, *SETS, "decode.max_num_seqs=4") as cluster:
        ranks = cluster.decodes
        await until(lambda: not any(rank.engine.has_work() for rank in ranks))
        programs += [rank.engine.programs for rank in ranks]
        usual = keys_of(programs[0])
        assert len(usual) == 4 * 5 * 2
        sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
        asked = requests(4)
        asked[1] = replace(asked[1], sampling=sampling)
        asked[2] = replace(asked[2], sampling=replace(asked[2].sampling, logprobs=2))
        asked[3] = replace(asked[3], sampling=replace(sampling, frequency_penalty=0.5))
        for _ in range(2):
            answers = await asyncio.gather(*map(cluster.complete, asked))
            assert is_exact(small_model, asked[0], answers[0][0])
            await until(lambda: not any(rank.engine.has_work() for rank in ranks))
            assert keys_of(programs[0]) == keys_of(programs[1])
        assert ran[programs[0]] == ran[programs[1]]
        assert {plan.program_id is None for plan in ran[programs[0]]} == {True, False}
        assert keys_of(programs[0]) - usual, "what was eager is made when nobody has work"
        await cluster.check_empty()
    assert not any(program.functions for program in programs)
    assert left == {0: 0, 1: 0}, "before their group ends"
    assert "cleanup function of the engine loop failed" not in caplog.text


@pytest.mark.parametrize("where", ["before", "after"])
async def test_an_exception_beside_the_program_fails_that_ranks_batch_alone(
    where: str, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank takes part in the agreed step, and its rows then run alone for a while."""
    async with rig(small_model, *SETS) as cluster:
        asked = requests(4)
        rank = cluster.decodes[1]
        async with running(cluster, asked) as tasks:
            error = RuntimeError("cosmic ray")
            if where == "before":
                rank.engine._launcher = launcher = Through(rank.engine._launcher)  # type: ignore
                failed = fail_once(launcher, "prepare", error)
            else:
                failed = fail_once(rank.engine, "_emit", error)
            await until(failed)
            for request, task in zip(asked, tasks, strict=True):
                assert is_exact(small_model, request, await task)
        assert all(one.loop.failure is None for one in cluster.decodes)
        assert len({one.loop.stall_detector.position().step for one in cluster.decodes}) == 1
        await cluster.check_empty()


@pytest.mark.parametrize("culprit", [0, 1])
async def test_an_exception_inside_the_program_ends_the_epoch_and_names_who(
    culprit: int, small_model: Path
) -> None:
    async with rig(small_model, *SETS) as cluster:
        async with running(cluster, requests(4, 200)) as tasks:
            rank = cluster.decodes[culprit]
            rank.engine._launcher = launcher = Through(rank.engine._launcher)  # type: ignore
            fail_once(launcher, "launch", RuntimeError("cosmic ray"))
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, RankLost) for error in ended), ended
        errors = [one.loop.failure for one in cluster.decodes]
        assert isinstance(errors[culprit], ProgramFailed)
        assert type(errors[1 - culprit]) is EpochEnded
        assert all(rank.loop.failure is None for rank in cluster.prefills)


async def test_prefill_before_the_program_and_inside_it(small_model: Path) -> None:
    async with rig(small_model, *SETS) as cluster:
        rank = cluster.prefills[1]
        failed = fail_once(rank.engine, "_build_inputs", RuntimeError("cosmic ray"))
        asked = requests(4)
        answers = await asyncio.gather(*map(cluster.complete, asked))
        assert failed() and all(map(is_exact, [small_model] * 4, asked, (a[0] for a in answers)))
        assert all(one.loop.failure is None for one in cluster.prefills)
        await cluster.check_empty()
        failed = fail_once(rank.engine, "_compute", RuntimeError("cosmic ray"))
        ended = await asyncio.gather(*map(cluster.complete, asked), return_exceptions=True)
        assert failed() and any(isinstance(error, RankLost) for error in ended), ended
        assert isinstance(rank.loop.failure, ProgramFailed)
        assert type(cluster.prefills[0].loop.failure) is EpochEnded


async def test_a_transfer_that_fails_frees_its_row_and_nothing_else(small_model: Path) -> None:
    """The transfer goes into one rank while both ranks decode."""
    async with rig(small_model, *SETS) as cluster:
        asked = requests(6)
        async with running(cluster, asked[:4]) as tasks:
            rank = min(cluster.decodes, key=num_active)
            failed = fail_once(rank.kv_receiver, "pull", HandoverError("the wire broke"))
            late = await asyncio.gather(*map(cluster.complete, asked[4:]))
            for request, task in zip(asked, tasks, strict=False):
                assert is_exact(small_model, request, await task)
        assert failed()
        assert all(
            is_exact(small_model, r, ids) for r, (ids, _, _) in zip(asked[4:], late, strict=True)
        )
        await cluster.check_empty()


async def test_preempted_aborted_and_unequally_full_ranks_stay_in_step(small_model: Path) -> None:
    """One rank holds long texts and runs out of pages; the other holds short ones."""
    sets = (*SETS, "kv.num_pages=28", "decode.max_num_seqs=6")
    async with rig(small_model, *sets) as cluster:
        preempted = watch(cluster)
        asked = requests(8, 90) + [greedy(f"s{i}", [5, 6, 7 + i], 9) for i in range(8)]
        tasks = [asyncio.create_task(cluster.complete(request)) for request in asked]
        await until(lambda: preempted)
        gone = next(iter(names(cluster.decodes[1])))
        cluster.begun[gone].abort()
        for request, task in zip(asked, tasks, strict=True):
            ids, _, finished = await task
            if request.request_id == gone:
                assert finished.finish_reason == "abort"
            else:
                assert len(ids) == request.sampling.max_tokens
            if ids:
                assert not near_ties(small_model, list(request.prompt_ids), ids)
        await cluster.check_empty()


async def test_a_gateway_that_leaves_in_the_middle_of_a_step_leaves_nothing(
    small_model: Path,
) -> None:
    async with rig(small_model, *SETS) as cluster:
        async with running(cluster, requests(4, 200)) as tasks:
            for task in tasks:
                task.cancel()
        await cluster.check_empty()
        [answer] = await asyncio.gather(cluster.complete(requests(1)[0]))
        assert is_exact(small_model, requests(1)[0], answer[0])


async def test_a_poison_row_in_a_gang_is_found_on_its_own_rank(small_model: Path) -> None:
    """The row fails outside the program each time, so no row of the other rank is ever
    suspected."""
    async with rig(small_model, *SETS) as cluster:
        asked = requests(4)
        async with running(cluster, asked) as tasks:
            rank = cluster.decodes[1]
            poison = next(iter(names(rank)))

            def poisonable(emit: Callable[..., Any], sequence: Any, **more: Any) -> Any:
                if sequence.identity.request_id == poison:
                    raise RuntimeError("cosmic ray")
                return emit(sequence=sequence, **more)

            for one in cluster.decodes:
                one.engine._emit = partial(poisonable, one.engine._emit)  # type: ignore
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for request, answer in zip(asked, ended, strict=True):
            if request.request_id == poison:
                assert isinstance(answer, StepFailed), answer
            else:
                assert isinstance(answer, list) and len(answer) == NUM_TOKENS, answer
        await cluster.check_empty()


async def test_a_fed_drafter_that_fails_costs_its_rank_one_steps_drafts(small_model: Path) -> None:
    """No row and no epoch is lost. The plan's shape stays, so the other rank is not affected."""
    failing = "speculation.drafter=tests.drafters:Failing"
    async with rig(small_model, *SETS, failing) as cluster:
        drafters = [rank.engine._loaded.drafter for rank in cluster.decodes]
        drafters[0].num_calls = 100
        asked = requests(4)
        answers = await asyncio.gather(*map(cluster.complete, asked))
        for request, (ids, _, _) in zip(asked, answers, strict=True):
            assert is_exact(small_model, request, ids)
        assert [
            rank.engine.programs._host_drafts.num_draftless_steps for rank in cluster.decodes
        ] == [0, 1]
        assert all(rank.loop.failure is None for rank in cluster.decodes)
        assert not cluster.members.reports
        await cluster.check_empty()
