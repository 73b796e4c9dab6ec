"""Both of Tandem's engines in one process without Ray, stepped by hand: run with a job's path."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.engines import Bench, load
from benchmarks.versus.job import Job, Timeline, Trial, read_job, say, say_batch
from tandem.core.execution import EAGER
from tandem.core.request import RELAXED, Request, SamplingParams, Speculation
from tandem.model.loaded import LoadedModel
from tandem.prefill_node.engine import ChunkResult

PAGE_SIZE = 64
MAX_BATCH_TOKENS = 2048


class Stamped(list[ChunkResult]):
    """Records when each prompt's first token came."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}
        self.copying_s = 0.0

    def append(self, done: ChunkResult) -> None:
        if done.first_token is not None:
            name = done.sequence.identity.request_id
            self.at_s[name] = time.perf_counter() - self.copying_s
        super().append(done)


class TimedBench(Bench):
    """Bench whose copies of pages are not timed, because they are no work of the engines."""

    def _copy(self, source: Sequence[int], target: Sequence[int], num_tokens: int) -> None:
        began_at = time.perf_counter()
        super()._copy(source, target, num_tokens)
        assert isinstance(self.progress, Stamped)
        self.progress.copying_s += time.perf_counter() - began_at


def new_bench(loaded: LoadedModel, job: Job, trial: Trial) -> TimedBench:
    num_tokens = trial.prompt_tokens + trial.max_tokens + 2 * (job.num_drafts + 1)
    pages_each = 2 * (num_tokens // PAGE_SIZE + 2)
    return TimedBench(
        loaded,
        num_drafts=job.num_drafts,
        max_rows=trial.num_sequences,
        page_size=PAGE_SIZE,
        num_pages=1 + pages_each * trial.num_sequences,
        max_batch_tokens=MAX_BATCH_TOKENS,
        progress=Stamped(),
    )


def run_batch(
    bench: TimedBench,
    trial: Trial,
    prompts: Sequence[list[int]],
    serial: "count[int]",
    relaxed: dict[str, Any],
) -> Timeline:
    asked = [new_request(f"r{next(serial)}", p, i, trial) for i, p in enumerate(prompts)]
    if relaxed:
        if bench.loaded.think_ids is None:
            raise ValueError("relaxed acceptance: the checkpoint has no think tokens; name others")
        asked = [thinking(request, bench.loaded.think_ids[0], relaxed) for request in asked]
    order = {request.request_id: i for i, request in enumerate(asked)}
    timeline, stamped = Timeline(len(asked)), bench.progress
    assert isinstance(stamped, Stamped)
    stamped.copying_s = 0.0
    began_at = time.perf_counter()
    firsts = bench.start_all(*asked)
    for name, (first, _) in firsts.items():
        timeline.add(stamped.at_s[name] - began_at, order[name], [first])
    bench.frames.clear()
    while bench.decode.has_work():
        bench.decode.step()
        now = time.perf_counter() - began_at - stamped.copying_s
        for update in bench.updates():
            timeline.add(now, order[update.identity.request_id], list(update.token_ids))
        bench.frames.clear()
    bench.check_empty()
    return timeline


def new_request(name: str, prompt: list[int], seed: int, trial: Trial) -> Request:
    sampling = SamplingParams(
        seed=seed,
        max_tokens=trial.max_tokens,
        ignore_eos=trial.ignore_eos,
        temperature=trial.temperature,
    )
    return Request(name, tuple(prompt), sampling=sampling)


def thinking(request: Request, think_id: int, relaxed: dict[str, Any]) -> Request:
    """Return a request with a prompt of the same length that opens thinking."""
    prompt_ids = (request.prompt_ids[0], think_id, *request.prompt_ids[2:])
    speculation = Speculation(acceptance=RELAXED, **relaxed)
    return replace(request, prompt_ids=prompt_ids, speculation=speculation)


def main() -> None:
    job = read_job(Path(sys.argv[1]))
    loaded = load(
        Path(job.model_path),
        f"model.dtype={job.dtype}",
        f"decode.num_threads={job.num_threads}",
        f"speculation.max_depth={job.num_drafts}",
    )
    versions = {"tandem": version("tandem"), "torch": torch.__version__}
    form = f"{loaded.kernels.name}, {loaded.exec_mode}"
    if loaded.exec_mode == EAGER:
        raise ValueError(f"kernels are {form}: install g++, these figures are of native ones")
    say("ready", versions=versions, num_threads=job.num_threads, form=form)
    serial = count()
    with torch.inference_mode():
        for trial in job.in_turn():
            bench = new_bench(loaded, job, trial)
            run_batch(bench, trial.warming(), trial.warm_up, serial, job.options)
            for prompts in trial.batches:
                say_batch(trial, run_batch(bench, trial, prompts, serial, job.options))
    say("end")


if __name__ == "__main__":
    main()
