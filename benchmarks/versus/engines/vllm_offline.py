"""vLLM's engine alone, stepped by hand. Run in its environment with a job's path."""

import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.versus.job import Job, Timeline, Trial, read_job, say, say_batch


def build(job: Job) -> Any:
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    if job.options["zen"] and not current_platform.is_zen_cpu():
        raise RuntimeError("vLLM uses zentorch only on AMD processors with AVX-512")
    speculative = {"method": "mtp", "num_speculative_tokens": job.num_drafts}
    args = EngineArgs(
        model=job.model_path,
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        max_num_seqs=job.max_sequences,
        max_num_batched_tokens=max(2048, job.max_model_len),
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        speculative_config=speculative if job.num_drafts else None,
    )
    return LLMEngine.from_engine_args(args)


def run_batch(
    engine: Any, trial: Trial, prompts: list[list[int]], serial: "count[int]"
) -> Timeline:
    from vllm.inputs import TokensPrompt

    timeline, order = Timeline(len(prompts)), {}
    began_at = time.perf_counter()
    for i, prompt in enumerate(prompts):
        name = f"r{next(serial)}"
        order[name] = i
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling(trial, i))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - began_at
        for output in outputs:
            timeline.add(now, order[output.request_id], list(output.outputs[0].token_ids))
    return timeline


def sampling(trial: Trial, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=trial.temperature,
        max_tokens=trial.max_tokens,
        ignore_eos=trial.ignore_eos,
        detokenize=False,
        seed=seed if trial.temperature else None,
        output_kind=RequestOutputKind.DELTA,
    )


def main() -> None:
    job = read_job(Path(sys.argv[1]))
    engine = build(job)
    import torch
    import vllm

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    say("ready", versions=versions, num_threads=torch.get_num_threads())
    serial = count()
    for trial in job.in_turn():
        run_batch(engine, trial.warming(), trial.warm_up, serial)
        for prompts in trial.batches:
            say_batch(trial, run_batch(engine, trial, prompts, serial))
    say("end")


if __name__ == "__main__":
    main()
