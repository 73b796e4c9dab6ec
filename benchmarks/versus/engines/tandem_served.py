"""`tandem serve`, colocated or split, and a client over gRPC: run with a job's path."""

import asyncio
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.harness.procs import actors, command_of, descendants, serving
from benchmarks.versus.engines.pinning import pin, sides
from benchmarks.versus.job import Job, Timeline, Trial, read_job, say, say_batch
from tandem.cluster.client.client import AsyncClient

PAGE_SIZE = 64
CHUNK = 256
"""Tokens of a prefill step in runs with arrival times, so that pulls can run between steps."""


def settings(job: Job) -> list[str]:
    is_split = job.options["mode"] == "disaggregated"
    prefill_cores, decode_cores = sides(job.cores)
    on_one_side = is_split or job.options.get("is_half", False)
    num_threads = len(decode_cores) if on_one_side else job.num_threads
    pages = 2 * (job.max_model_len // PAGE_SIZE + 2) * job.max_sequences + 1
    return [
        f"mode={job.options['mode']}",
        f"model.path={job.model_path}",
        f"model.dtype={job.dtype}",
        f"speculation.max_depth={job.num_drafts}",
        "speculation.draft_length=fixed",
        f"decode.num_threads={num_threads}",
        f"decode.max_num_seqs={job.max_sequences}",
        f"kv.page_size={PAGE_SIZE}",
        f"kv.num_pages={pages}",
        *([f"prefill.num_threads={len(prefill_cores)}"] if is_split else []),
        *(
            [f"prefill.max_num_batched_tokens={CHUNK}"]
            if any(t.arrivals_s for t in job.trials)
            else []
        ),
    ]


def pin_sides(job: Job, serve_pid: int) -> None:
    """Pin decode ranks to the cores of decode, and all other processes to those of prefill."""
    prefill_cores, decode_cores = sides(job.cores)
    decode = set(actors(serve_pid, "DecodeActor"))
    assert decode, [command_of(pid) for pid in descendants(serve_pid)]
    for pid in {os.getpid(), serve_pid, *descendants(serve_pid)}:
        pin(pid, decode_cores if pid in decode else prefill_cores)


async def ask(
    client: AsyncClient,
    trial: Trial,
    prompt: list[int],
    index: int,
    timeline: Timeline,
    began: float,
) -> None:
    await trial.arrival(index, began)
    pieces = client.generate(
        prompt,
        max_tokens=trial.max_tokens,
        ignore_eos=trial.ignore_eos,
        temperature=trial.temperature,
        seed=index,
    )
    async for piece in pieces:
        timeline.add(time.perf_counter() - began, index, list(piece.token_ids))


async def run_batch(client: AsyncClient, trial: Trial, prompts: list[list[int]]) -> Timeline:
    timeline, began = Timeline(len(prompts)), time.perf_counter()
    asks = (ask(client, trial, prompt, i, timeline, began) for i, prompt in enumerate(prompts))
    await asyncio.gather(*asks)
    return timeline


async def run_trials(job: Job, address: str) -> None:
    async with AsyncClient(address, retry_s=0) as client:
        for trial in job.in_turn():
            await run_batch(client, trial.warming(), trial.warm_up)
            for prompts in trial.batches:
                say_batch(trial, await run_batch(client, trial, prompts))


def main() -> None:
    job = read_job(Path(sys.argv[1]))
    with serving(*settings(job)) as server:
        if job.options["mode"] == "disaggregated":
            pin_sides(job, server.process.pid)
        versions = {"tandem": version("tandem"), "torch": torch.__version__}
        threads = next(s for s in settings(job) if s.startswith("decode.num_threads"))
        say("ready", versions=versions, num_threads=int(threads.rpartition("=")[2]))
        asyncio.run(run_trials(job, server.address))
    say("end")


if __name__ == "__main__":
    main()
