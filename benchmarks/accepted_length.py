"""Accepted length of a checkpoint: tokens per verify step in greedy continuation.

    python -m benchmarks.accepted_length [--path DIR] [--num-prompts 100] [--set KEY=VALUE] [--json]

Prompts are pieces of files that training never saw. Runs both engines in one process; the
hand-over changes nothing here but whether the first hidden state was shipped.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.driven.engines import Bench, load
from core.request import Request, SamplingParams, SequenceUpdate
from model.loaded import LoadedModel
from training.corpus import held_out_prompts

TINY = Path(__file__).resolve().parents[1] / "training" / "tiny-v3"
BATCH = 16


def requests(path: Path, num_prompts: int, max_tokens: int) -> list[Request]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompts = held_out_prompts(tokenizer, num_prompts, min_len=64, max_len=512, seed=7)
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True)
    return [Request(f"r{i}", tuple(ids), sampling=sampling) for i, ids in enumerate(prompts)]


def batches(items: list[Request], size: int) -> Iterator[list[Request]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def measure(
    loaded: LoadedModel, asked: list[Request], num_drafts: int, *, ship_hidden: bool
) -> dict[str, object]:
    """Means over all requests; acceptance per position is of drafts proposed."""
    bench = Bench(
        loaded,
        num_drafts=num_drafts,
        max_rows=BATCH,
        num_pages=600,
        page_size=64,
        ship_hidden=ship_hidden,
    )
    ends: list[SequenceUpdate] = []
    title = f"n = {num_drafts}, {'ship' if ship_hidden else 'zero'}_hidden"
    for batch in track(list(batches(asked, BATCH)), title, console=Console(stderr=True)):
        bench.generate(*batch)
        ends += [update for update in bench.updates() if update.counts is not None]
    bench.check_empty()
    counts = [end.counts for end in ends if end.counts is not None]
    num_steps = sum(c.num_steps for c in counts)
    num_emitted = sum(r.sampling.max_tokens - 1 for r in asked)
    per_position = [sum(c.accepted_per_position[i] for c in counts) for i in range(num_drafts)]
    return {
        "num_drafts": num_drafts,
        "first_step": "ship_hidden" if ship_hidden else "zero_hidden",
        "accepted_length": num_emitted / num_steps,
        "accepted_per_position": [accepted / num_steps for accepted in per_position],
        "first_step_accepted": sum(c.first_step_accepted for c in counts) / len(counts),
    }


def show(rows: list[dict[str, object]]) -> Table:
    table = Table(title="greedy continuation of held-out files")
    for column in ("n", "first step", "accepted length", "per position", "first-step accepted"):
        table.add_column(column)
    for row in rows:
        positions = row["accepted_per_position"]
        assert isinstance(positions, list)
        table.add_row(
            str(row["num_drafts"]),
            str(row["first_step"]),
            f"{row['accepted_length']:.2f}",
            " ".join(f"{p:.2f}" for p in positions),
            f"{row['first_step_accepted']:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    loaded = load(args.path, f"decode.num_threads={args.num_threads}", *args.sets)
    torch.manual_seed(0)
    asked = requests(args.path, args.num_prompts, args.max_tokens)
    rows = [measure(loaded, asked, n, ship_hidden=True) for n in (1, 2, 3)]
    rows.append(measure(loaded, asked, 3, ship_hidden=False))
    if args.json:
        print(json.dumps(rows))
    else:
        Console().print(show(rows))


if __name__ == "__main__":
    main()
