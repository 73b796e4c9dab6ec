"""Run chaos with real processes and compare every answer (tests/chaos/__init__.py).

    python -m tests.chaos                           # 20 minutes
    python -m tests.chaos --minutes 3 --seed 7
    python -m tests.chaos --minutes 5 --controllers # tests/chaos/controllers.py

Half of the time the cluster has gangs, the other half single ranks.

The exit code is 1 in any of these cases:

- An answer was wrong or was refused.
- Something was left behind.
- The cluster was not back at full size two minutes after the last fault.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.soak.__main__ import show
from tests.chaos.asker import asked_ones
from tests.chaos.controllers import Controllers
from tests.chaos.faults import KINDS, Faults, Trouble
from tests.chaos.gaps import parts_of_longest
from tests.chaos.machines import Machines, asking, lines, machines
from tests.chaos.report import Report, spans, take
from tests.pods import CAN_RUN

SETS = (
    "control.drain_timeout_s=6",
    *("model.dtype=float32", "speculation.profile_at_startup=false", "control.stall_timeout_s=3"),
    *("kv.num_pages=300", "kv_transfer.host=auto"),
    *("decode.max_num_seqs=4", "server.max_queued=8"),
)
LAYOUTS = {
    "gangs": ("prefill.dp_size=2", "decode.dp_size=2", "decode.replicas=2"),
    "lone ranks": ("prefill.replicas=2", "decode.replicas=2"),
}
NUM_RANKS = {"gangs": 6, "lone ranks": 4}
NUM_NODES = 4
START_S, BACK_S, LOOK_S = 300.0, 120.0, 0.2
TWO_AT_ONCE = 0.2


def run(layout: str, args: argparse.Namespace, minutes: float, bar: Progress) -> Report:
    draw = random.Random(f"{args.seed} {layout}")
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        folder = Path(name)
        with machines(NUM_NODES, [*SETS, *LAYOUTS[layout], *args.sets], folder) as made:
            task = bar.add_task(f"{layout}: begins", total=minutes * 60)
            made.begin(START_S)
            trouble = Faults(made, draw, only=args.only)
            faults: Trouble = Controllers(made, draw) if args.controllers else trouble
            with asking(made, args.clients, args.seed, args.poison):
                began = time.time()
                for _ in fail(faults, draw, began + minutes * 60, args.every):
                    num = len(lines(folder / "answers.jsonl"))
                    text = f"{faults.applied.total()} faults, {num} answers"
                    bar.update(task, completed=time.time() - began, description=text)
                faults.end()
                (folder / "calm").touch()
                over = time.time()
                full_s = _back_after(made, NUM_RANKS[layout])
            left = sum(len(node.ranks()) for node in made.nodes) - NUM_RANKS[layout]
            report = Report(dict(faults.applied), _messages(folder))
            report.full_size_after_s, report.num_left = full_s, left
            report.more, report.is_more_good = faults.table(), faults.is_good()
            if args.logs:
                _keep_logs(made, faults, args.logs / layout.replace(" ", "-"))
        report.end = lines(folder / "end.json")[0]
        states = lines(folder / "states.jsonl")
        report.away = spans(states, over, {"SERVING", "DEGRADED"})
        report.short = spans(states, over, {"SERVING"})
        report.poison = Counter(one["came"] for one in lines(folder / "poison.jsonl"))
        told = lines(folder / "answers.jsonl")
        noted = (lines(folder / f"{name}.jsonl") for name in ("attempts", "gangs"))
        report.gap_parts = parts_of_longest(told, *noted)
        checking = bar.add_task(f"{layout}: checks {len(told)}", total=None)
        take(report, asked_ones(args.seed), told, lambda: bar.advance(checking))
        return report


def fail(faults: Trouble, draw: random.Random, until: float, every_s: float) -> Iterator[None]:
    """Inject faults at random moments, ``every_s`` apart on average; yields between two polls."""
    next_at = time.time() + every_s
    while (now := time.time()) < until:
        if now >= next_at:
            for _ in range(1 + (draw.random() < TWO_AT_ONCE)):
                faults.one()
            next_at = now + every_s * draw.uniform(0.4, 1.6)
        faults.sweep()
        yield
        time.sleep(LOOK_S)  # time: between two looks


def _back_after(made: Machines, num_ranks: int) -> float | None:
    """Return the seconds until all ranks serve and the gateways report it; None after a timeout."""
    began = time.monotonic()
    while time.monotonic() < began + BACK_S:
        states = lines(made.folder / "states.jsonl")
        there = sum(len(node.ranks()) for node in made.nodes)
        are_ready = all(one.is_ready and not one.has_ended for one in made.gateways)
        if states[-1]["state"] == "SERVING" and there == num_ranks and are_ready:
            return round(time.monotonic() - began, 1)
        time.sleep(LOOK_S)  # time: between two looks
    return None


def _messages(folder: Path) -> dict[str, int]:
    """Return the number of message faults by kind, over all processes."""
    return dict(Counter(w for p in folder.glob("*.messages") for w in p.read_text().split()))


def _keep_logs(made: Machines, faults: Trouble, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faults.log").write_text("\n".join(faults.log))
    for name, machine in made.all.items():
        (folder / f"{name}.log").write_text(machine.pod.log())
        if not machine.has_ended:
            root = Path(f"/proc/{machine.pod.init()}/root/tmp/ray")
            for logs in ("worker-*.err", "raylet.out", "gcs_server.out"):
                for path in root.glob(f"session_2*/logs/{logs}"):
                    (folder / f"{name}-{path.name}").write_bytes(path.read_bytes())
    for path in made.folder.glob("*.json*"):
        (folder / path.name).write_text(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="all layouts together [20]")
    add("--every", type=float, default=16.0, help="seconds between faults, on average [16]")
    add("--layout", choices=[*LAYOUTS], action="append", help="only this one")
    add(
        "--controllers", action="store_true", help="they die in each phase, and nobody loads for it"
    )
    add("--only", choices=[*KINDS], action="append", default=[], help="this kind of faults")
    add("--clients", type=int, default=6, help="requests at a time [6]")
    add("--poison", type=float, metavar="SECONDS", help="as often one asks what kills its rank")
    add("--seed", type=int, default=0, help="another one does other things [0]")
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="config key")
    add("--logs", type=Path, help="where logs are kept")
    args = parser.parse_args()
    if not CAN_RUN:
        parser.error("needs root and iproute2")
    layouts = ["gangs"] if args.controllers else args.layout or [*LAYOUTS]
    reports = []
    with Progress(console=Console(stderr=True)) as bar:
        for layout in layouts:
            reports.append(run(layout, args, args.minutes / len(layouts), bar))
    for layout, report in zip(layouts, reports, strict=True):
        print(f"\n{layout}")
        show(report.table())
    sys.exit(not all(report.is_good for report in reports))


if __name__ == "__main__":
    main()
