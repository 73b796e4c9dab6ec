"""llama.cpp's library alone in a separate process (llama_driver.cpp), without drafts.

Run with a job's path. Checkpoints are converted once, by the script of llama.cpp's tree.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.versus.environments import LLAMA_FOLDER, LLAMA_VERSION
from benchmarks.versus.job import Job, Timeline, Trial, read_job, say, say_batch

CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
del sys.argv[1]
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
"""Patch of the conversion script, whose list of tokenizers lacks ours. Prompts are token ids
anyway."""
OUT_TYPES = {"bfloat16": "bf16", "float32": "f32"}
MAX_PAIRS_PER_PASS = 512
"""Maximum tokens of a forward, llama.cpp's default."""


def converted(folder: Path, model: Path, dtype: str) -> Path:
    files = sorted([model / "config.json", *model.glob("*.safetensors")])
    seen = "".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    digest = hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()
    made = folder / "gguf" / f"{digest}-{OUT_TYPES[dtype]}.gguf"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        asked = [str(model), "--outtype", OUT_TYPES[dtype], "--outfile", str(part)]
        command = [sys.executable, "-c", CONVERT, str(folder / "tree"), *asked]
        subprocess.run(command, check=True, stdout=sys.stderr)
        part.rename(made)
    return made


class Driver:
    """The driver's process, which ends with its input. Raises RuntimeError if it has ended by
    itself."""

    def __init__(self, folder: Path, job: Job) -> None:
        self._most = job.max_sequences
        model = converted(folder, Path(job.model_path), job.dtype)
        each = -(-job.max_model_len // 256) * 256
        sizes = map(str, (job.num_threads, job.max_sequences, each, MAX_PAIRS_PER_PASS))
        self._process = subprocess.Popen(
            [str(folder / "driver"), str(model), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._lines().readline() != "ready\n":
            raise RuntimeError(f"the driver ended with {self._process.wait()}")

    def run_batch(self, trial: Trial, prompts: Sequence[list[int]]) -> Timeline:
        timeline, stdin = Timeline(len(prompts)), self._process.stdin
        assert stdin is not None
        if len(prompts) > self._most:
            raise ValueError(
                f"{len(prompts)} prompts at once; the driver has no queue: {self._most}"
            )
        asked = (trial.max_tokens, trial.temperature, int(trial.ignore_eos), len(prompts))
        lines = [" ".join(map(str, line)) for line in (asked, *prompts)]
        stdin.write("\n".join([*lines, ""]))
        stdin.flush()
        for line in self._lines():
            if line == "end\n":
                return timeline
            after_us, sequence, token = map(int, line.split())
            timeline.add(after_us / 1e6, sequence, [token])
        raise RuntimeError(f"the driver ended with {self._process.wait()}")

    def _lines(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout


def main() -> None:
    job = read_job(Path(sys.argv[1]))
    driver = Driver(Path(os.environ[LLAMA_FOLDER]), job)
    say("ready", versions={"llama.cpp": LLAMA_VERSION}, num_threads=job.num_threads)
    for trial in job.in_turn():
        driver.run_batch(trial.warming(), trial.warm_up)
        for prompts in trial.batches:
            say_batch(trial, driver.run_batch(trial, prompts))
    say("end")


if __name__ == "__main__":
    main()
