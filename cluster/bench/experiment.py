"""Experiments: the runs that the options request, their order, and their results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.progress import Progress

from tandem.cluster.bench import speculation
from tandem.cluster.bench.arrivals import arrival_times_s
from tandem.cluster.bench.node_use import NodeUsage
from tandem.cluster.bench.options import BenchOptions
from tandem.cluster.bench.runner import LoadGenerator, Record, Run
from tandem.cluster.bench.stats import AcceptanceStats, Metrics, Slo, acceptance, measure
from tandem.cluster.bench.workload import Job, RandomLengths, parse_range, random_jobs, trace_jobs
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.client.options import GenerateOptions
from tandem.core.info import ModelInfo

DEFAULT_CONCURRENCY = 8
NUM_ROUNDS = 2
"""Number of runs per compared draft count.

Their order alternates (0 3, then 3 0) to cancel drift.
"""


@dataclass(frozen=True, slots=True)
class Arm:
    """All runs with one ``max_drafts``, and their results.

    ``max_drafts`` None stands for the server's maximum.
    """

    max_drafts: int | None
    runs: tuple[Run, ...]
    metrics: Metrics
    acceptance: AcceptanceStats

    @property
    def records(self) -> list[Record]:
        return [record for run in self.runs for record in run.records]


@dataclass(frozen=True, slots=True)
class Speedups:
    """Measured and modelled gains of one arm. cluster/bench/speculation.py defines ``a`` and ``c``.

    Attributes:
        cost_ratio: Cost of one draft in steps without drafts (``c``); None if unknown.
        model_first: Modelled TPOT speed-up with the measured ``a`` of position 1.
        model_fitted: Modelled TPOT speed-up with the ``a`` that gives the measured accepted length.
        measured: TPOT without drafts divided by TPOT of this arm; None without an arm without
            drafts.
        measured_per_round: The same ratio per round.
        operations: FLOPs per output token divided by those without drafts, at the fitted ``a``.
        reads: Factor by which drafts reduce reads of weights and cache per output token, at the
            fitted ``a``.
    """

    cost_ratio: float | None
    model_first: float | None
    model_fitted: float | None
    measured: float | None
    measured_per_round: tuple[float | None, ...]
    operations: float
    reads: float


class Trial:
    """Runs the experiment that ``options`` describe. Sends no request after ``options.duration_s``.

    Raises:
        ValueError: The server cannot serve the requested number of drafts or the workload.
    """

    def __init__(
        self, client: AsyncClient, model: ModelInfo, options: BenchOptions, progress: Progress
    ) -> None:
        max_drafts = max(arm or 0 for arm in options.arms)
        if max_drafts > model.num_draft_tokens:
            raise ValueError(
                f"{max_drafts} drafts per step are too many: this server makes at most "
                f"{model.num_draft_tokens}; use fewer"
            )
        self._client = client
        self._options = options
        self._progress = progress
        self._jobs = jobs_of(options, model, options.num_requests)
        num = options.warm_up
        self._warm_up = jobs_of(options, model, num, warm_up=True) if num else []
        self._due_s = due_times_s(options, self._jobs)

    async def run(self) -> list[Arm]:
        """Run the warm-up of every arm, then all rounds. All arms have the same jobs."""
        arms = self._options.arms
        num_rounds = NUM_ROUNDS if len(arms) > 1 else 1
        stop_at = time.monotonic() + self._options.duration_s
        plan: list[tuple[int, int | None]] = [(-1, arm) for arm in arms if self._warm_up]
        for i in range(num_rounds):
            plan += [(i, arm) for arm in arms[:: -1 if i % 2 else 1]]
        runs: dict[int | None, list[Run]] = {arm: [] for arm in arms}
        for i, (number, arm) in enumerate(plan):
            share_s = max(0.0, stop_at - time.monotonic()) / (len(plan) - i)
            run = await self._run(number=number, num_rounds=num_rounds, arm=arm, stop_s=share_s)
            if number >= 0:
                runs[arm].append(run)
        slo = Slo(self._options.slo_ttft_ms, self._options.slo_tpot_ms)
        return [arm_of(arm, runs[arm], slo) for arm in arms]

    async def _run(self, number: int, num_rounds: int, arm: int | None, stop_s: float) -> Run:
        """Run the jobs of round ``number``, or the warm-up if it is -1.

        No request is sent later than ``stop_s`` seconds after the start.
        """
        jobs = self._warm_up
        due_s = None
        if number >= 0:
            low, high = (len(self._jobs) * i // num_rounds for i in (number, number + 1))
            jobs = self._jobs[low:high]
            if self._due_s is not None:
                start_s = self._due_s[low - 1] if low else 0.0
                due_s = [at - start_s for at in self._due_s[low:high]]
        name = "warm-up" if number < 0 else f"round {number + 1}"
        drafts = "" if arm is None else f", {arm} drafts"
        task = self._progress.add_task(name + drafts, total=len(jobs))
        options = self._options
        sampling = GenerateOptions(
            temperature=options.temperature,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
            max_drafts=arm,
            acceptance=options.acceptance,
            timeout_s=options.timeout_s,
        )
        before = NodeUsage.of(await self._client.status())
        generator = LoadGenerator(self._client, sampling, lambda: self._progress.advance(task))
        if due_s is None:
            concurrency = options.concurrency or DEFAULT_CONCURRENCY
            run = await generator.closed_loop(jobs, concurrency, stop_s)
        else:
            run = await generator.open_loop(jobs, due_s, stop_s)
        return replace(run, use=NodeUsage.of(await self._client.status()).since(before))


def jobs_of(
    options: BenchOptions, model: ModelInfo, num: int, *, warm_up: bool = False
) -> list[Job]:
    """Return the jobs of the workload, or of its warm-up. A trace is warmed up with random jobs."""
    if options.trace is not None and not warm_up:
        return trace_jobs(path=options.trace, model=model, max_jobs=num, seed=options.seed)
    shape = RandomLengths(
        parse_range("--prompt-tokens", options.prompt_tokens),
        parse_range("--output-tokens", options.output_tokens),
    )
    if options.workload == "shared-prefix":
        lengths = shape.prompt_tokens, shape.output_tokens
        shape = RandomLengths(*lengths, options.num_prefixes, options.prefix_tokens)
    return random_jobs(model=model, num=num, shape=shape, seed=options.seed, warm_up=warm_up)


def due_times_s(options: BenchOptions, jobs: Sequence[Job]) -> list[float] | None:
    """Return when each job is due, in seconds after the start; None for a closed loop."""
    if options.rate is not None:
        return arrival_times_s(
            num_requests=len(jobs),
            rate=options.rate,
            burstiness=options.burstiness,
            seed=options.seed,
        )
    if options.concurrency is not None or jobs[0].arrival_s is None:
        return None
    return [(job.arrival_s or 0.0) - jobs[0].arrival_s for job in jobs]


def arm_of(max_drafts: int | None, runs: Sequence[Run], slo: Slo) -> Arm:
    """Return the arm with the results of ``runs``."""
    records = [record for run in runs for record in run.records]
    return Arm(
        max_drafts=max_drafts,
        runs=tuple(runs),
        metrics=measure(runs, slo),
        acceptance=acceptance(records),
    )


def speedups(
    arms: Sequence[Arm], cost_ratio: float | None, draft_flops_ratio: float = 0.0
) -> list[Speedups]:
    """Return the measured and modelled gains of each arm.

    Args:
        arms: Arms of the experiment.
        cost_ratio: Cost of one draft in steps without drafts; None: measured on the arm with the
            most drafts.
        draft_flops_ratio: FLOPs of one draft token divided by FLOPs of one main-model token.
    """
    base = next((arm for arm in arms if arm.max_drafts == 0), None)
    deepest = max(arms, key=lambda arm: arm.acceptance.num_drafts)
    num_drafts = deepest.acceptance.num_drafts
    if cost_ratio is None and base is not None and num_drafts:
        step_ms = deepest.metrics.step_ms
        base_ms = base.metrics.step_ms
        if step_ms and base_ms:
            num_nodes = num_drafts * deepest.acceptance.nodes_per_depth
            cost_ratio = speculation.cost_ratio(step_ms, base_ms, num_nodes)
    return [
        _speedups(arm=arm, base=base, cost_ratio=cost_ratio, draft_flops_ratio=draft_flops_ratio)
        for arm in arms
    ]


def _speedups(
    arm: Arm, base: Arm | None, cost_ratio: float | None, draft_flops_ratio: float
) -> Speedups:
    acceptance = arm.acceptance
    num_drafts = acceptance.num_drafts
    num_nodes = acceptance.num_drafts * acceptance.nodes_per_depth
    fitted = 0.0 if acceptance.fitted is None else acceptance.fitted
    own = fitted, num_drafts, draft_flops_ratio, num_nodes

    def model(share: float | None) -> float | None:
        if share is None or cost_ratio is None:
            return None
        return speculation.speedup(
            acceptance=share, num_drafts=num_drafts, cost_ratio=cost_ratio, num_nodes=num_nodes
        )

    pairs = [] if base is None else list(zip(base.runs, arm.runs, strict=True))
    return Speedups(
        cost_ratio=cost_ratio,
        model_first=model(acceptance.first),
        model_fitted=model(acceptance.fitted),
        measured=None if base is None else _tpot_ratio(base.runs, arm.runs),
        measured_per_round=tuple(_tpot_ratio([before], [after]) for before, after in pairs),
        operations=speculation.operations(*own),
        reads=speculation.expected_length(fitted, num_drafts),
    )


def _tpot_ratio(before: Sequence[Run], after: Sequence[Run]) -> float | None:
    old, new = (measure(runs, Slo()).tpot_ms for runs in (before, after))
    return old.mean / new.mean if old is not None and new is not None and new.mean else None
