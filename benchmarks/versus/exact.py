"""Whether llama.cpp's arm emits Tandem's greedy tokens on the shipped checkpoint, by dtype.

    python -m benchmarks.versus.exact [--prompts 5] [--tokens 64]

The exit code is 1 if any answer differs. On other processors a near tie may make one differ. Makes
the environment of the arm if there is none.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.harness.engines import Bench, greedy, load
from benchmarks.versus.cache import default_cache
from benchmarks.versus.checkpoints import SHIPPED, find
from benchmarks.versus.engines.llama_offline import OUT_TYPES, Driver
from benchmarks.versus.environments import LLAMA_FOLDER, llama_environment
from benchmarks.versus.job import Job, Trial

PROMPT_TOKENS, PAGE_SIZE, SEED = 128, 64, 7


def same(trial: Trial, dtype: str, folder: Path) -> list[bool]:
    """Return for each prompt whether all tokens of its answer are the same."""
    [prompts] = trial.batches
    path = find(SHIPPED, default_cache()).path
    driver = Driver(folder, Job(str(path), dtype, 0, 1, [], [trial]))
    theirs = driver.run_batch(trial, prompts)
    num_pages = 1 + len(prompts) * 2 * (-(-(PROMPT_TOKENS + trial.max_tokens) // PAGE_SIZE) + 1)
    loaded = load(path, f"model.dtype={dtype}")
    bench = Bench(
        loaded, num_drafts=0, max_rows=len(prompts), num_pages=num_pages, page_size=PAGE_SIZE
    )
    asked = [greedy(f"r{i}", p, trial.max_tokens, ignore_eos=True) for i, p in enumerate(prompts)]
    return [
        ours == [token for event in theirs.of(i) for token in event.token_ids]
        for i, (ours, _) in enumerate(bench.generate(*asked))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=5, metavar="N", help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="[%(default)s]")
    args = parser.parse_args()
    environment = llama_environment(default_cache(), said=lambda text: print(text, file=sys.stderr))
    prompts = find(SHIPPED, default_cache()).prompts(args.prompts, PROMPT_TOKENS, SEED)
    trial = Trial("exact", prompts, [prompts], args.tokens, ignore_eos=True)
    is_same = True
    for dtype in OUT_TYPES:
        found = same(trial, dtype, Path(environment.variables()[LLAMA_FOLDER]))
        is_same &= all(found)
        print(f"{dtype}: {sum(found)} of {len(found)} answers of {args.tokens} tokens are the same")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
