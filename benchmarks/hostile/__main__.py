"""Measure honest streams in parallel with hostile clients of one gateway.

    python -m benchmarks.hostile [--kind connects ..] [--rounds 5] [--json FILE]

Eight honest streams send requests to a real `tandem serve`, while one kind of hostile client runs.
Rounds alternate with those of a control: the same requests, and processes that burn CPU time. They
burn the hostile client's CPU time, and the gateway's beyond the cost of honest requests. All
traffic goes over loopback.

The exit code is 1 in any of these cases:

- Honest requests were refused, or a rank was lost.
- p99 of TTFT was more than twice that of the control.
- p99 of ITL was more than 1.5 times that of the control.
- The gateway grew by more than 20 MB from the second round to the fifth.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from benchmarks.harness.held_out import held_out
from benchmarks.harness.procs import free_port, serving
from benchmarks.hostile.kinds import HARMLESS, KINDS
from benchmarks.hostile.report import harm_table, is_within_bounds, summary, time_table, times
from benchmarks.hostile.rounds import run_all
from tandem.core.config import TINY_MODEL

NUM_POSITIONS = 163_840
"""Context of DeepSeek-V3: it decides how long a text the gateway receives."""
MIN_PROMPT, MAX_PROMPT = 32, 96
SETS = ("decode.max_num_seqs=16", "server.max_queued=8", "kv.num_pages=600")


def write_long_model(folder: Path) -> None:
    """Write the shipped checkpoint with the context of DeepSeek-V3; weights are linked."""
    for path in TINY_MODEL.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = NUM_POSITIONS
    (folder / "config.json").write_text(json.dumps(config))


def honest_texts(num: int) -> list[str]:
    """Return held-out texts of a few dozen tokens."""
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    return [tokenizer.decode(ids) for ids in held_out(num, MIN_PROMPT, MAX_PROMPT, seed=3)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kind", dest="kinds", choices=[*KINDS, *HARMLESS], action="append", help="kind [all]")
    add("--rounds", type=int, default=5, help="rounds with each kind [5]")
    add("--requests", type=int, default=40, help="honest requests of a round [40]")
    add("--streams", type=int, default=8, help="honest streams [8]")
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="config key")
    add("--json", type=Path, metavar="FILE", help="file for the figures")
    args = parser.parse_args()
    kinds = args.kinds or [*KINDS]
    http = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="hostile") as name:
        write_long_model(Path(name))
        sets = (f"model.path={name}", f"server.http_address={http}", *SETS, *args.sets)
        with serving(*sets) as server, Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("rounds", total=2 * args.rounds * len(kinds))
            work = run_all(
                server=server,
                http=http,
                kinds=kinds,
                texts=honest_texts(args.requests),
                num_streams=args.streams,
                num_rounds=args.rounds,
                on_round=lambda: bar.advance(task),
            )
            alone, measured = asyncio.run(work)
    found = [summary(one) for one in measured]
    Console(width=150).print(time_table(found, times(alone)), harm_table(found))
    if args.json:
        args.json.write_text(json.dumps({"alone": times(alone), "kinds": found}, indent=1))
    sys.exit(not all(map(is_within_bounds, found)))


if __name__ == "__main__":
    main()
