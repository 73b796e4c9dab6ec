"""A failed step ends only the request that caused it; slow ranks are not taken for stuck ones."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from tandem.cluster.gateway.liveness import LivenessPhase
from tandem.core.errors import PoisonRequest, RankLost, StepFailed
from tandem.core.request import Request
from tandem.decode_node.planning.states import NUM_ISOLATED_STEPS
from tandem.decode_node.program.launcher import InFlightStep, Launcher
from tandem.decode_node.program.programs import PreparedStep
from tandem.prefill_node.engine import PrefillEngine, PrefillInputs, PromptResult
from tests.gates import Gate, begin_together
from tests.integration.test_lost_prefill import prompts
from tests.rig import Rig, rig
from tests.waiting import until

SETS = ("kv.num_pages=400", "kv.page_size=16", "decode.max_num_seqs=8", "speculation.max_depth=3")
NUM_TOKENS = 24


def poisoned(request_id: str) -> bool:
    return request_id.startswith("poison")


def break_decode(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[list[str]]:
    """Make each step with a poison request raise; return the request ids of every such step."""
    launch, seen = Launcher.launch, list[list[str]]()

    def poisonable(self: Launcher, step: PreparedStep) -> InFlightStep:
        names = [one.identity.request_id for one in step.sequences]
        if any(map(poisoned, names)):
            seen.append(names)
            raise error
        return launch(self, step)

    monkeypatch.setattr(Launcher, "launch", poisonable)
    return seen


def break_prefill(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[list[str]]:
    compute, seen = PrefillEngine._compute, list[list[str]]()

    def poisonable(self: PrefillEngine, work: PrefillInputs) -> Iterator[PromptResult]:
        names = [chunk.sequence.identity.request_id for chunk in self._chunks]
        if any(map(poisoned, names)):
            seen.append(names)
            raise error
        return compute(self, work)

    monkeypatch.setattr(PrefillEngine, "_compute", poisonable)
    return seen


async def ask_all(cluster: Rig, requests: list[Request]) -> list[list[int] | BaseException]:
    answers = await asyncio.gather(
        *(cluster.complete(request) for request in requests), return_exceptions=True
    )
    return [one if isinstance(one, BaseException) else one[0] for one in answers]


@pytest.mark.parametrize(
    ("break_", "overlap"),
    [
        (break_decode, False),
        pytest.param(break_decode, True, marks=pytest.mark.slow),
        (break_prefill, False),
    ],
)
async def test_a_poison_request_is_refused_once_it_failed_alone_and_the_others_end(
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_: Callable[[pytest.MonkeyPatch, Exception], list[list[str]]],
    overlap: bool,
) -> None:
    failed = break_(monkeypatch, RuntimeError("cosmic ray"))
    async with rig(small_model, *SETS, f"decode.overlap={overlap}") as cluster:
        asked = [
            greedy(f"poison-{i}" if i == 5 else f"r{i}", ids, NUM_TOKENS, ignore_eos=True)
            for i, ids in enumerate(prompts(6, 9))
        ]
        answers = await ask_all(cluster, asked)
        for request, answer in zip(asked, answers, strict=True):
            if poisoned(request.request_id):
                assert isinstance(answer, PoisonRequest), answer
            else:
                assert isinstance(answer, list) and len(answer) == NUM_TOKENS, answer
                assert not near_ties(small_model, list(request.prompt_ids), answer)
        assert len(failed) == 2 and failed[1] == ["poison-5"], failed
        assert cluster.gateway.is_healthy(), "a failed step is no lost rank"
        await cluster.check_empty()


async def test_a_step_that_failed_once_costs_nobody_an_answer(
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sequences of that step run alone for a few steps, then together again."""
    launch, failed_at, widths = Launcher.launch, list[int](), list[int]()

    def flaky(self: Launcher, step: PreparedStep) -> InFlightStep:
        widths.append(len(step.sequences))
        if len(step.sequences) == 6 and not failed_at:
            failed_at.append(len(widths))
            raise MemoryError("no room for logits")
        return launch(self, step)

    monkeypatch.setattr(Launcher, "launch", flaky)
    async with rig(small_model, *SETS) as cluster:
        begin_together(cluster.decodes[0], 6)
        asked = [greedy(f"r{i}", ids, 80, ignore_eos=True) for i, ids in enumerate(prompts(6, 9))]
        for request, answer in zip(asked, await ask_all(cluster, asked), strict=True):
            assert isinstance(answer, list) and len(answer) == 80, answer
            assert not near_ties(small_model, list(request.prompt_ids), answer)
        after = widths[failed_at[0] :]
        assert after[:NUM_ISOLATED_STEPS] == [1] * NUM_ISOLATED_STEPS, after
        assert after.count(1) >= 6 * NUM_ISOLATED_STEPS and max(after) > 1, after
        await cluster.check_empty()


async def test_a_broken_invariant_ends_the_engine_and_no_answer_is_wrong(
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_decode(monkeypatch, AssertionError("two sequences own the same page"))
    async with rig(small_model, *SETS, "server.recovery_timeout_s=0.5") as cluster:
        [answer] = await ask_all(cluster, [greedy("poison", prompts(1, 9)[0], 8)])
        assert isinstance(answer, RankLost) and not isinstance(answer, StepFailed)
        assert not cluster.gateway.is_healthy()
        [(gang, _, _)] = cluster.members.reports
        assert gang == cluster.decodes[0].spec.gang


@pytest.mark.parametrize("kind", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
async def test_a_stuck_engine_loses_its_requests_to_others_and_comes_back(
    small_model: Path, kind: str
) -> None:
    """The rank's asyncio loop still answers every heartbeat."""
    sets = (*SETS, "prefill.replicas=2", "decode.replicas=2", "control.stall_timeout_s=0.4")
    async with rig(small_model, *sets) as cluster:
        ranks = cluster.decodes if kind == "decode" else cluster.prefills
        asked = [greedy(f"r{i}", ids, 80, ignore_eos=True) for i, ids in enumerate(prompts(4, 9))]
        stuck = ranks[0]
        step = Gate(stuck)
        answers = await ask_all(cluster, asked)
        assert step.is_held, "it has nobody's step"
        handle = cluster.gateway.fleet.ranks[stuck.spec.epoch_name]
        await until(lambda: handle.liveness.phase is LivenessPhase.OUT)
        assert {gang for gang, _, _ in cluster.members.reports} == {stuck.spec.gang}
        assert cluster.gateway.is_healthy(), "the others serve on"
        step.open()
        for request, answer in zip(asked, answers, strict=True):
            assert isinstance(answer, list) and len(answer) == 80, answer
            assert not near_ties(small_model, list(request.prompt_ids), answer)
        await until(lambda: handle.liveness.is_well)
        again = await ask_all(cluster, [greedy("again", prompts(1, 9)[0], 20, ignore_eos=True)])
        assert isinstance(again[0], list) and len(again[0]) == 20
        await cluster.check_empty()
