"""transformers' greedy ``generate`` over a batch of equally long prompts: run with a job's path."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.harness.tiny import reference
from benchmarks.versus.job import Job, Timeline, Trial, read_job, say, say_batch


class Stamped(BaseStreamer):
    """Records when each column of tokens comes; the prompt comes first and is left out."""

    def __init__(self, num_sequences: int, eos_token_ids: set[int]) -> None:
        self.timeline = Timeline(num_sequences)
        self._stops, self._ended = eos_token_ids, set[int]()
        self._began_at, self._saw_prompt = time.perf_counter(), False

    def put(self, value: Any) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        now = time.perf_counter() - self._began_at
        for i, token in enumerate(value.flatten().tolist()):
            if i not in self._ended:
                self.timeline.add(now, i, [token])
            if token in self._stops:
                self._ended.add(i)

    def end(self) -> None:
        pass


def run_batch(model: Any, trial: Trial, prompts: list[list[int]]) -> Timeline:
    eos = None if trial.ignore_eos else model.config.eos_token_id
    stamped = Stamped(len(prompts), set() if eos is None else {eos})
    ids = torch.tensor(prompts)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=trial.max_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        streamer=stamped,
    )
    return stamped.timeline


def main() -> None:
    job: Job = read_job(Path(sys.argv[1]))
    torch.set_num_threads(job.num_threads)
    model = reference(Path(job.model_path), getattr(torch, job.dtype))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    say("ready", versions=versions, num_threads=torch.get_num_threads())
    with torch.inference_mode():
        for trial in job.in_turn():
            run_batch(model, trial.warming(), trial.warm_up)
            for prompts in trial.batches:
                say_batch(trial, run_batch(model, trial, prompts))
    say("end")


if __name__ == "__main__":
    main()
