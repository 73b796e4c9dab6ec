"""What drawing its tokens costs a decode step: steps of sampled rows beside those of greedy ones.

    python -m benchmarks.sampling [--vocab 2048,16384,129280] [--rows 1,8,32] [--drafts 0,3]
        [--rounds 4] [--num-threads 2] [--json]

Checkpoints are random, of the shipped one's shape but for the vocabulary. Their logits are flat,
which is the worst case, for then every token may win, or spread as those of a model. All ways take
turns.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.decode_step import Case, benches, turn
from benchmarks.driven.tiny import random_tensors
from tandem.core.config import TINY_MODEL
from tandem.model.checkpoint.config import ModelConfig

ARM = "recorded bf16"
WAYS = "greedy", "all", "top-p 0.95", "top-k 50"
SPREADS = {"flat": 0.01, "spread": 1.0}
"""Times a head that gives logits of a deviation of 3."""
NUM_STEPS = 10


def write(folder: Path, vocab_size: int, spread: float) -> Path:
    """A checkpoint with so many tokens."""
    config = json.loads((TINY_MODEL / "config.json").read_text()) | {"vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(ModelConfig.from_dir(folder), seed=1)
    tensors["lm_head.weight"] *= spread
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", default="2048,16384,129280", metavar="N,N,..")
    parser.add_argument("--rows", default="1,8,32", metavar="N,N,..")
    parser.add_argument("--drafts", default="0,3", metavar="N,N,..")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every way")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    vocabs, rows, drafts = (
        [int(num) for num in text.split(",")] for text in (args.vocab, args.rows, args.drafts)
    )
    arms = [(vocab, name, num) for vocab in vocabs for name in SPREADS for num in drafts]
    found = []
    with Progress(console=Console(stderr=True)) as bar:
        for vocab, name, num_drafts in bar.track(arms, description="checkpoints"):
            with TemporaryDirectory(prefix="tandem-") as folder:
                path = write(Path(folder), vocab, SPREADS[name])
                [bench] = benches(path, [ARM], num_drafts, args.num_threads, max(rows)).values()
            walls: dict[Case, list[float]] = defaultdict(list)
            cases = [Case(num, num_drafts, way) for num in rows for way in WAYS]
            for case in bar.track(cases * args.rounds, description=f"{vocab} tokens, {name}"):
                walls[case] += [step.wall for step in turn(bench, case, NUM_STEPS)]
            for num in rows:
                ms = {way: statistics.median(walls[Case(num, num_drafts, way)]) for way in WAYS}
                found.append(
                    {"vocab": vocab, "logits": name, "drafts": num_drafts, "rows": num, "ms": ms}
                )
    print(json.dumps(found)) if args.json else Console().print(table(found))


def table(found: list[dict]) -> Table:
    ways = WAYS[1:]
    shown = Table(title="a step of rows of temperature 0.8 by one of greedy rows, medians")
    for column in ("tokens", "logits", "drafts", "rows", "greedy, ms", *ways):
        shown.add_column(column, justify="right")
    for one in found:
        ms = one["ms"]
        what = (str(one[key]) for key in ("vocab", "logits", "drafts", "rows"))
        ratios = (f"{ms[way] / ms['greedy']:.2f}" for way in ways)
        shown.add_row(*what, f"{ms['greedy']:.2f}", *ratios)
    return shown


if __name__ == "__main__":
    main()
