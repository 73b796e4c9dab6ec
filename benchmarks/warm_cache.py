"""Acceptance after steps without drafts, against a run that never stopped drafting.

    python -m benchmarks.warm_cache [--path DIR] [--num-prompts 100] [--idle-steps 20] [--json]

Both runs write the same greedy answers, so the steps compared start behind the same 20 tokens. A
drafter whose cache went cold meanwhile would show here (bar: within 2 %).
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.accepted_length import BATCH, TINY, batches, requests
from benchmarks.driven.engines import Bench, IdleFirst, load
from tandem.core.request import Request
from tandem.model.loaded import LoadedModel

MAX_DRAFTS = 3


def runs_behind(bench: Bench, num_first: int) -> list[int]:
    """Tokens of every step that starts behind ``num_first`` tokens of decoding, but each
    answer's last, which may be cut."""
    told: dict[str, list[int]] = defaultdict(list)
    for update in bench.updates():
        told[update.identity.request_id].append(len(update.token_ids))
    kept = []
    for runs in told.values():
        behind = 0
        for run in runs[:-1]:
            if behind >= num_first:
                kept.append(run)
            behind += run
    return kept


def measure(
    loaded: LoadedModel, asked: list[Request], num_idle: int, num_first: int
) -> dict[str, float]:
    """Mean accepted drafts and accepted length of the steps behind ``num_first`` tokens."""
    runs: list[int] = []
    title = f"{num_idle} steps without drafts"
    for batch in track(list(batches(asked, BATCH)), title, console=Console(stderr=True)):
        bench = Bench(
            loaded,
            num_drafts=MAX_DRAFTS,
            max_rows=BATCH,
            num_pages=600,
            page_size=64,
            length=IdleFirst(num_idle),
        )
        bench.generate(*batch)
        runs += runs_behind(bench, num_first)
        bench.check_empty()
    length = sum(runs) / len(runs)
    return {"num_steps": len(runs), "accepted": length - 1, "accepted_length": length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--idle-steps", type=int, default=20)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    loaded = load(args.path, f"decode.num_threads={args.num_threads}")
    asked = requests(args.path, args.num_prompts, args.max_tokens)
    arms = {
        name: measure(loaded, asked, num_idle, args.idle_steps)
        for name, num_idle in (("uninterrupted", 0), ("interrupted", args.idle_steps))
    }
    ratio = arms["interrupted"]["accepted"] / arms["uninterrupted"]["accepted"]
    if args.json:
        print(json.dumps({**arms, "ratio": ratio}))
        return
    for name, arm in arms.items():
        Console().print(f"{name:>13}  {arm['accepted_length']:.3f} tokens a step, "
                        f"{arm['num_steps']} steps")  # fmt: skip
    Console().print(f"{'accepted':>13}  {ratio:.4f} of the uninterrupted run's drafts")


if __name__ == "__main__":
    main()
