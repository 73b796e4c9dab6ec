"""Accepted length of a checkpoint: tokens per verify step in continuations of held-out text.

    python -m benchmarks.accepted_length [--path DIR] [--num-prompts 100] [--num-tokens 1 2 3]
        [--temperature 0.8] [--true-context] [--set KEY=VALUE] [--json]

Prompts are pieces of files that training never saw. Both engines run in one process. The hand-over
changes nothing here except whether the first hidden state was shipped. With ``--true-context`` each
step is independent, after the text as it was written.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.harness.engines import Bench, load
from tandem.core.answer import SpeculationCounts
from tandem.core.request import Request, SamplingParams
from tandem.model.loaded import LoadedModel
from training.corpus import held_out_prompts

TINY = Path(__file__).resolve().parents[1] / "training" / "tiny-v3"
BATCH = 16
PLACES, LEAST = 8, 32
"""Places in each prompt after which an independent step runs, and the minimum number of tokens
before the first place."""


def requests(
    path: Path, num_prompts: int, max_tokens: int, temperature: float = 0.0
) -> list[Request]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompts = held_out_prompts(tokenizer, num_prompts, min_len=64, max_len=512, seed=7)
    return [
        Request(
            f"r{i}",
            tuple(ids),
            sampling=SamplingParams(temperature, seed=i, max_tokens=max_tokens, ignore_eos=True),
        )
        for i, ids in enumerate(prompts)
    ]


def batches(items: list[Request], size: int) -> Iterator[list[Request]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def pieces(asked: list[Request]) -> tuple[list[Request], dict[str, int]]:
    """Cut each prompt at PLACES evenly spaced places. Return the cut prompts, and the token that
    follows each, by request id."""
    cut, firsts = [], {}
    for one in asked:
        step = (len(one.prompt_ids) - 1 - LEAST) // PLACES
        for end in (LEAST + i * step for i in range(PLACES)):
            name = f"{one.request_id}-{end}"
            cut.append(replace(one, request_id=name, prompt_ids=one.prompt_ids[:end]))
            firsts[name] = one.prompt_ids[end]
    return cut, firsts


def measure(
    loaded: LoadedModel,
    asked: list[Request],
    num_drafts: int,
    *,
    handover_hidden: bool = True,
    true_context: bool = False,
) -> dict[str, object]:
    """Return means over all requests. Acceptance per position is relative to the drafts
    proposed."""
    asked, firsts = pieces(asked) if true_context else (asked, {})
    bench = Bench(
        loaded,
        num_drafts=num_drafts,
        max_rows=BATCH,
        num_pages=600,
        page_size=64,
        handover_hidden=handover_hidden,
        firsts=firsts,
    )
    counts: list[SpeculationCounts] = []
    num_emitted = 0
    title = f"n = {num_drafts}, handover_hidden={handover_hidden}"
    for batch in track(list(batches(asked, BATCH)), title, console=Console(stderr=True)):
        num_first = len(bench.start_all(*batch))
        bench.frames.clear()
        bench.decode.step()
        while bench.decode.has_work() and not true_context:
            bench.decode.step()
        num_emitted += sum(len(update.token_ids) for update in bench.updates())
        if true_context:
            counts += [bench.sequence(one.request_id).counts for one in batch]
            assert all(bench.drop(one.request_id) for one in batch) and num_first == len(batch)
        counts += [end.counts for end in bench.updates() if end.counts is not None]
    bench.check_empty()
    num_steps = sum(c.num_steps for c in counts)
    per_position = [sum(sum(c.accepted_per_position[i : i + 1]) for c in counts) for i in range(8)]
    return {
        "num_drafts": num_drafts,
        "handover_hidden": handover_hidden,
        "accepted_length": num_emitted / num_steps,
        "num_nodes": sum(c.num_nodes for c in counts) / num_steps,
        "accepted_per_position": [accepted / num_steps for accepted in per_position[:num_drafts]],
        "first_step_accepted": sum(c.first_step_accepted for c in counts) / len(counts),
    }


def show(rows: list[dict[str, object]], title: str) -> Table:
    table = Table(title=title)
    for column in ("n", "nodes", "handover", "accepted length", "per position", "first-step"):
        table.add_column(column)
    for row in rows:
        positions = row["accepted_per_position"]
        assert isinstance(positions, list)
        table.add_row(
            str(row["num_drafts"]),
            f"{row['num_nodes']:.1f}",
            str(row["handover_hidden"]),
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
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--true-context", action="store_true", help="independent steps after true text"
    )
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    threads = f"decode.num_threads={args.num_threads}"
    asked = requests(args.path, args.num_prompts, args.max_tokens, args.temperature)
    rows = []
    for n in args.num_tokens:
        loaded = load(args.path, threads, *args.sets, f"speculation.max_depth={n}")
        rows.append(measure(loaded, asked, n, true_context=args.true_context))
    if loaded.drafter.num_features and not args.true_context:
        rows.append(measure(loaded, asked, n, handover_hidden=False))
    if args.json:
        print(json.dumps(rows))
    else:
        Console().print(show(rows, "continuation of held-out files"))


if __name__ == "__main__":
    main()
