"""Run scripted loads through the decode engine and record the plan and the output of each step.

    python -m tests.golden --write

Step costs are scripted too, so that plans that depend on the load are the same on every machine. A
refactoring leaves every line of tests/data/golden as it is (one file for each load). A change of
behaviour names the lines that it changed, and the reason, in its commit.
"""

import random
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from benchmarks.harness import engines
from benchmarks.harness.engines import Bench, greedy
from tandem.core.draft_shapes import chain_shapes
from tandem.core.execution import CAPTURED
from tandem.core.request import ACCEPTANCES, REJECTION, RELAXED, Request, Speculation
from tandem.decode_node.planning.acceptance_stats import DepthTransitions
from tandem.decode_node.planning.draft_length import adaptive as choose_adaptive_shape
from tandem.decode_node.planning.program_table import common_step_keys
from tandem.decode_node.planning.step_plan import (
    CAPTURE,
    GREEDY_TRAITS,
    SAMPLED_TRAITS,
    SamplingTraits,
    StepKey,
    StepPlan,
    StepProposal,
    StepReport,
    step_report,
)
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.decode_node.program import launcher
from tandem.model.drafters.mtp_rows import MtpCatchUp
from tandem.model.loaded import LoadedModel
from tandem.runtime.lockstep import LocalPlanner, Plan
from tests.small import write_small

FOLDER = Path(__file__).parent / "data" / "golden"
LOADS: dict[str, Callable[["Load"], None]] = {}


def load_of(run: Callable[["Load"], None]) -> Callable[["Load"], None]:
    LOADS[run.__name__] = run
    return run


class Load:
    """Writes one line for each step: its key ("-" if no step was launched), and the emitted
    tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.lines: list[str] = []
        self.bench: Bench
        self._plans: list[StepPlan | None] = []

    def begin(self, loaded: LoadedModel | None = None, **more: object) -> Bench:
        self.bench = Bench(loaded or self.loaded, **more)  # type: ignore[arg-type]
        self.lines.append(" ".join(f"{name}={value}" for name, value in more.items()))
        return self.bench

    def start(self, *requests: Request) -> None:
        for name, (first, _) in self.bench.start_all(*requests).items():
            self.lines.append(f"+ {name} {first}")

    def drop(self, name: str) -> None:
        self.bench.drop(name)
        self.lines.append(f"- {name}")

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            self._plans.clear()
            self.bench.frames.clear()
            try:
                self.bench.decode.step()
            except RuntimeError as error:
                self.lines.append(f"! {error}")
                self.bench.decode.fail(error)
            told = [
                f"{one.identity.request_id} {','.join(map(str, one.token_ids))}"
                + (f" {one.finish_reason}" if one.finish_reason else "")
                + (f" {counted(one.logprobs)}" if one.logprobs else "")
                for one in self.bench.updates()
            ]
            plans = [keyed(plan) for plan in self._plans]
            self.lines.append(" | ".join((*(plans or ["no plan"]), *told)))

    def finish(self) -> None:
        """Run until no work is left, and check that no resource stays allocated."""
        while self.bench.decode.has_work():
            self.step()
        self.bench.check_empty()

    def planned(self, plan: StepPlan | None) -> None:
        self._plans.append(plan)


def counted(logprobs: tuple) -> str:
    return "logprobs " + ",".join(str(len(one.top_ids)) for one in logprobs)


def keyed(plan: StepPlan | None) -> str:
    if plan is None:
        return "-"
    key, traits = plan.key, plan.key.traits
    asked = ["greedy" if traits.all_greedy else "sampled", *(["rules"] * traits.has_logit_rules)]
    is_all = traits.rule_names == tuple(sorted(ACCEPTANCES))
    asked += ["all kinds"] if is_all else [kind for kind in traits.rule_names if kind != "strict"]
    size = f"{key.num_rows} rows {key.shape_index} drafts, {key.catch_up} to catch up"
    return f"{plan.purpose} {size} {' '.join(asked)}"


def cost_s(key: StepKey) -> float:
    """Return the scripted cost of a step, which rises faster beyond 12 tokens."""
    num_tokens = key.num_rows * (key.shape_index + 1)
    return 1e-3 * (1.0 + 0.02 * num_tokens + 0.05 * max(0, num_tokens - 12) + 0.03 * key.catch_up)


def scripted(report: Callable[..., StepReport]) -> Callable[..., StepReport]:
    return lambda plan, program_s, **rest: report(plan=plan, program_s=cost_s(plan.key), **rest)


def trace_of(loaded: LoadedModel, name: str) -> list[str]:
    """Return the recorded lines of the load ``name``."""
    load, plan = Load(loaded), LocalPlanner.plan

    def noting(self: LocalPlanner, proposal: object) -> Plan:
        made = plan(self, proposal)
        load.planned(made.key)
        return made

    reported = patch.object(launcher, "step_report", scripted(launcher.step_report))
    with reported, patch.object(LocalPlanner, "plan", noting):
        LOADS[name](load)
    return load.lines


def prompts(num: int, length: int = 20) -> list[list[int]]:
    return [[5 + (7 * i + 3 * k) % 90 for k in range(length - i)] for i in range(num)]


def everything(num_tokens: int = 40) -> list[Request]:
    """Return requests that differ in sampling, penalties, log probabilities and kinds of
    acceptance, with two plain ones."""
    asked = [greedy(f"r{i}", ids, num_tokens, ignore_eos=True) for i, ids in enumerate(prompts(6))]
    hot = replace(asked[0].sampling, temperature=0.8, top_p=0.9, seed=5)
    ruled = replace(asked[0].sampling, presence_penalty=0.5, min_tokens=8, logprobs=2)
    asked[1] = replace(asked[1], sampling=replace(hot, logprobs=0))
    asked[2] = replace(asked[2], sampling=ruled)
    asked[3] = replace(asked[3], sampling=hot, speculation=Speculation(2, REJECTION))
    asked[4] = replace(asked[4], speculation=Speculation(1, RELAXED, 5, 0.5))
    return asked


def one_by_one(load: Load) -> None:
    """Requests start one after another, and two of them are dropped."""
    for request in everything():
        load.start(request)
        load.step(2)
    for i in (4, 0):
        load.drop(f"r{i}")
        load.step()
    load.finish()


@load_of
def three_drafts(load: Load) -> None:
    load.begin(num_drafts=3, max_rows=6)
    one_by_one(load)


@load_of
def three_drafts_overlapped(load: Load) -> None:
    load.begin(num_drafts=3, max_rows=6, overlap=True)
    one_by_one(load)


@load_of
def three_drafts_in_buckets(load: Load) -> None:
    load.begin(num_drafts=3, max_rows=6, buckets=(2, 4), handover_hidden=False)
    one_by_one(load)


@load_of
def no_drafts(load: Load) -> None:
    load.begin(num_drafts=0, max_rows=6)
    one_by_one(load)


@load_of
def no_drafts_wanted(load: Load) -> None:
    """The drafter is not fed while no request wants drafts; it must catch up when one does."""
    load.begin(num_drafts=3, max_rows=2)
    plain, drafting = prompts(2)
    load.start(greedy("plain", plain, 60, ignore_eos=True, max_drafts=0))
    load.step(20)
    load.start(greedy("drafting", drafting, 30, ignore_eos=True))
    load.finish()


@load_of
def small_pool(load: Load) -> None:
    load.begin(num_drafts=3, max_rows=4, num_pages=36)
    load.start(*(greedy(f"r{i}", ids, 60, ignore_eos=True) for i, ids in enumerate(prompts(4))))
    load.finish()


@load_of
def suspects(load: Load) -> None:
    load.begin(num_drafts=3, max_rows=4, overlap=True)
    load.start(*(greedy(f"r{i}", ids, 50, ignore_eos=True) for i, ids in enumerate(prompts(4))))
    for name in ("r1", "r3"):
        load.bench.sequence(name).num_isolated_steps = 8
    load.finish()


@load_of
def a_step_that_fails(load: Load) -> None:
    for overlap in (False, True):
        bench = load.begin(num_drafts=2, max_rows=3, overlap=overlap)
        asked = [greedy(f"r{i}", ids, 40, ignore_eos=True) for i, ids in enumerate(prompts(3))]
        load.start(*asked[:2])
        load.step(3)
        with patch.object(type(bench.decode._launcher), "launch", side_effect=RuntimeError("no")):
            load.step()
        load.start(asked[2])
        load.finish()


@load_of
def adaptive(load: Load) -> None:
    """Step times are profiled first; then rows arrive in groups of three until all have
    finished."""
    load.begin(num_drafts=3, max_rows=12, draft_length="adaptive", measures=True, num_pages=400)
    load.finish()
    asked = [greedy(f"r{i}", ids, 120, ignore_eos=True) for i, ids in enumerate(prompts(12))]
    for i in range(0, 12, 3):
        load.start(*asked[i : i + 3])
        load.step(25)
    load.finish()


@load_of
def made_ahead(load: Load) -> None:
    """Programs are prepared while the rank is idle, or once one was needed often enough."""
    kernels = copy(load.loaded.kernels)
    kernels.exec_mode = CAPTURED
    ahead = replace(load.loaded, kernels=kernels, uncapturable={})
    load.begin(ahead, num_drafts=1, max_rows=6, draft_length="adaptive", buckets=(3, 6))
    load.finish()
    load.start(*everything(30))
    load.finish()
    ruled = everything(200)[2]
    load.start(ruled)
    load.finish()


@load_of
def a_gang_of_three(load: Load) -> None:
    """Plans for a gang of three ranks whose rows come and go, and which are all idle at times."""
    draw, sizes = random.Random(7), (1, 2, 4, 8)
    usual = common_step_keys(sizes, chain_shapes(3), MtpCatchUp(3))
    planner = StepPlanner(sizes, chain_shapes(3), choose_adaptive_shape, MtpCatchUp(3), True, usual)
    ranks, key = [list[int]() for _ in range(3)], None
    for step in range(500):
        for limits in ranks:
            if step % 100 < 30:
                limits.clear()
            elif draw.random() < 0.3:
                limits[:] = draw.choices((0, 2, 3), (1, 1, 4), k=draw.randrange(9))
        plan = planner([proposal_of(draw, limits, key) for limits in ranks])
        load.lines.append(keyed(plan))
        key = None if plan is None or plan.purpose == CAPTURE else plan.key


def proposal_of(draw: random.Random, limits: list[int], last: StepKey | None) -> StepProposal:
    """Return a proposal that reports the ``last`` step, in which most drafts were accepted."""
    rows = [
        (limit, range(1, 1 + sum(draw.random() < 0.75 for _ in range(limit)))) for limit in limits
    ]
    report = (
        None
        if last is None
        else step_report(
            DepthTransitions.from_shapes(chain_shapes(3)), StepPlan(last), cost_s(last), rows
        )
    )
    traits = draw.choices(
        (GREEDY_TRAITS, SAMPLED_TRAITS, SamplingTraits(has_logit_rules=True)), (6, 3, 1)
    )[0]
    counts, backlog = tuple(map(limits.count, range(4))), 1 + draw.randrange(4)
    return StepProposal(counts, backlog, traits, CAPTURED, report=report)


def main() -> None:
    assert sys.argv[1:] == ["--write"], __doc__
    with TemporaryDirectory() as folder:
        write_small(Path(folder))
        loaded = engines.load(Path(folder), "model.kernels=native")
        for name in LOADS:
            lines = trace_of(loaded, name)
            (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")
            print(f"{name}: {len(lines)} lines")


if __name__ == "__main__":
    main()
