"""A decode step of DeepSeek-V3 in gangs of 8 to 64 ranks, on paper: collectives and bytes.

    python -m benchmarks.wide_gangs [--rows 32] [--drafts 3]

Bytes are those that one rank sends in one step, of payloads in bf16, for each way of dispatch; the
planner's messages are packed as they are sent. Nothing is measured; docs/gangs.md has the formulas.
"""

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tandem.core.schema import pack
from tandem.decode_node.planning.step_plan import Proposal, Report, StepKey
from tandem.runtime.gang.told import Proposed, Told

NUM_MOE_LAYERS, HIDDEN, NUM_CHOSEN, NUM_GROUPS, NUM_KEPT = 58, 7168, 8, 8, 4
"""Of V3: MoE layers of the main model, D, K, n_group, topk_group."""
BF16, INT32, LENGTH = 2, 4, 4
SIZES = (8, 16, 32, 64)
LINKS = {"NVLink, 450 GB/s": 450e9, "400 Gb/s": 50e9}


@dataclass(frozen=True)
class Step:
    """``rows`` of each rank, ``drafts`` in the step."""

    rows: int
    drafts: int

    @property
    def num_passes(self) -> int:
        """MoE layers that are run: those of the verify pass, and one for each draft pass."""
        return NUM_MOE_LAYERS + max(1, self.drafts)

    @property
    def num_tokens(self) -> int:
        """Of a rank, summed over these: n + 1 a row in verify and in pass 1, then one a pass."""
        wide = self.rows * (self.drafts + 1)
        return (NUM_MOE_LAYERS + 1) * wide + max(0, self.drafts - 1) * self.rows


def num_ranks_met(size: int) -> float:
    """Ranks other than its own that hold some of a token's experts, expected: K draws among the
    ranks of the groups that are kept, a share of which is the token's own rank."""
    eligible = max(1, size * NUM_KEPT // NUM_GROUPS)
    met = eligible * (1 - (1 - 1 / eligible) ** NUM_CHOSEN)
    return met * (size - 1) / size


def gathered_bytes(step: Step, size: int) -> float:
    """All tokens to all ranks; K outputs for each token of each rank, computed there or not."""
    there = (size - 1) * step.num_tokens * (HIDDEN * BF16 + NUM_CHOSEN * INT32)
    return there + (size - 1) * step.num_tokens * NUM_CHOSEN * HIDDEN * BF16


def exchanged_bytes(step: Step, size: int) -> float:
    """A token once to each rank that it needs; what was computed elsewhere comes back."""
    there = step.num_tokens * num_ranks_met(size) * (HIDDEN * BF16 + NUM_CHOSEN * INT32)
    back = step.num_tokens * NUM_CHOSEN * (size - 1) / size * HIDDEN * BF16
    return there + back


def planner_bytes(step: Step, size: int) -> tuple[int, int]:
    """What rank 0 receives and sends for one plan."""
    key = StepKey(step.rows, step.drafts, step.drafts + 1)
    told = (step.rows,) * step.drafts
    report = Report(key, 0.0123456789, told, told)
    proposal = Proposal((0,) * step.drafts + (step.rows,), step.drafts + 1, report=report)
    asked = len(pack(Proposed(100_000, pack(proposal)))) + LENGTH
    plan = len(pack(Told(100_000, pack(key)))) + LENGTH
    return size * asked, size * plan


def main() -> None:
    parser = argparse.ArgumentParser(description="V3's decode step in wide gangs, on paper.")
    parser.add_argument("--rows", type=int, default=32, help="rows of each rank")
    parser.add_argument("--drafts", type=int, default=3)
    args = parser.parse_args()
    step = Step(args.rows, args.drafts)
    table = Table(box=None, padding=(0, 2, 0, 0))
    times = [f"{way}, {link}" for way in ("gathered", "exchanged") for link in LINKS]
    for column in ("ranks", "gathered", "exchanged", *times, "planner in / out"):
        table.add_column(column, justify="right")
    for size in SIZES:
        sent = gathered_bytes(step, size), exchanged_bytes(step, size)
        ms = [num / speed * 1e3 for num in sent for speed in LINKS.values()]
        planner = " / ".join(f"{num / 1e3:.1f} kB" for num in planner_bytes(step, size))
        sizes = [f"{num / 1e9:.2f} GB" for num in sent]
        table.add_row(str(size), *sizes, *(f"{one:.1f} ms" for one in ms), planner)
    console = Console(width=160)
    console.print(
        f"{args.rows} rows a rank, {args.drafts} drafts: {step.num_passes} MoE layers a step, "
        f"{step.num_tokens} tokens of a rank through them; {2 * step.num_passes} collectives "
        f"gathered, {3 * step.num_passes} exchanged"
    )
    console.print(table)


if __name__ == "__main__":
    main()
