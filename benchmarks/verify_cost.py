"""v and c: costs of verifying n drafts and of making one, divided by a step without drafts.

    python -m benchmarks.verify_cost [--rows 1,8,32] [--num-threads 2] [--json]

    python -m benchmarks.verify_cost --nodes 1,2,4,8,16,32,63 [--plot FILE.png]

The cost of a draft is that of one more draft: a pass over one token per row, the head, and the
choice. All are parts of one step over the same rows of held-out prompts of 128 tokens. They run in
the form used for serving, and take turns. n drafts pay if they bring more than v + n c tokens. With
--nodes, v is the cost of verifying trees of these sizes.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness.engines import Bench, greedy, load
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL
from tandem.core.draft_shapes import chain_shapes
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.rows import Rows
from tandem.decode_node.program.step import draft, verify
from tandem.model.drafters.base import Drafts
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import Caches
from tandem.model.network.tree import build_tree

MAX_DRAFTS = 3
KernelModule = Callable[[Tensor], tuple[Tensor]]


def trees_of(bench: Bench, num_rows: int, sizes: list[int]) -> dict[str, KernelModule]:
    """Return programs by name that verify trees of each size, whose nodes have two children
    each."""
    loaded, rows = bench.loaded, bench.decode._launcher.rows

    def verified(num_nodes: int) -> KernelModule:
        parents = tuple(i // 2 for i in range(num_nodes))
        tree = build_tree(torch.tensor([parents], dtype=torch.int64), num_nodes.bit_length())
        tokens = (torch.arange(num_rows * num_nodes) % 1900).view(num_rows, num_nodes) + 50

        def part(read_B: Tensor) -> tuple[Tensor]:
            told = rows.select(read_B, None), Drafts(tokens), tree.expand(num_rows)
            *_, logits_BNV = verify(loaded, bench.caches, *told)
            return (logits_BNV.argmax(-1),)

        return part

    nothing = parts_of(loaded, rows, bench.caches, num_rows)["verify 0"]
    return {"verify 0": nothing} | {f"verify {n}": verified(n) for n in sizes}


def parts_of(
    loaded: LoadedModel, rows: Rows, caches: Caches, num_rows: int
) -> dict[str, KernelModule]:
    """Return programs by name, as functions of the rows to read; "verify 0" is a plain step's."""

    def verified(num_drafts: int) -> KernelModule:
        tokens = torch.arange(num_rows * num_drafts, device=loaded.device) + 50
        drafts = Drafts(tokens.view(num_rows, num_drafts))

        def part(read_B: Tensor) -> tuple[Tensor]:
            *_, logits_BNV = verify(loaded, caches, rows.select(read_B, None), drafts)
            return (logits_BNV.argmax(-1),)

        return part

    def drafted(num_drafts: int) -> KernelModule:
        def part(read_B: Tensor) -> tuple[Tensor]:
            key = StepKey(num_rows, num_drafts, catch_up=1)
            selected, level = rows.select(read_B, None), chain_shapes(num_drafts)[-1]
            return (draft(loaded.drafter, caches, selected, key, level).tokens_BN,)

        return part

    parts = {f"verify {n}": verified(n) for n in range(MAX_DRAFTS + 1)}
    return parts | {f"draft {n}": drafted(n) for n in (1, MAX_DRAFTS)}


@torch.inference_mode()
def measure(num_rows: int, num_threads: int, num_rounds: int, sizes: list[int]) -> dict[str, float]:
    """Return the median ms of each part."""
    sets = "model.dtype=bfloat16", f"decode.num_threads={num_threads}", "speculation.max_depth=3"
    loaded = load(TINY_MODEL, *sets)
    bench = Bench(loaded, max_rows=num_rows, num_pages=1 + 9 * num_rows, page_size=64)
    for i, ids in enumerate(held_out(num_rows, 128, 129, seed=3)):
        bench.start(greedy(f"r{i}", ids, 200, ignore_eos=True))
    for sequence in bench.decode.scheduler.running:
        sequence.pages.extend(bench.pool.allocate(1))
        bench.decode._launcher.rows.update_page_table(sequence)
    known = loaded, bench.decode._launcher.rows, bench.caches
    made = trees_of(bench, num_rows, sizes) if sizes else parts_of(*known, num_rows)
    parts = {name: loaded.kernels.make_replayable(f) for name, f in made.items()}
    read_B, times = torch.arange(num_rows), defaultdict(list)
    for _ in range(num_rounds):
        for name, part in parts.items():
            began_at = time.perf_counter()
            part(read_B)
            times[name].append(1e3 * (time.perf_counter() - began_at))
    found = {name: statistics.median(values[2:]) for name, values in times.items()}
    if sizes:
        return found
    first, all_drafts = found.pop("draft 1"), found.pop(f"draft {MAX_DRAFTS}")
    return found | {"draft": (all_drafts - first) / (MAX_DRAFTS - 1)}


def save_plot(path: Path, found: dict[int, dict[str, float]]) -> None:
    """Plot v over the number of nodes, one line for each number of rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for num, ms in found.items():
        plain, *others = ms.values()
        nodes = [int(name.split()[1]) for name in ms][1:]
        label = f"{num} row{'s' if num > 1 else ''}"
        axes.plot(nodes, [one / plain for one in others], marker="o", label=label)
    axes.plot(nodes, [1 + n for n in nodes], color="black", linestyle=":", label="as many tokens")
    axes.set(xlabel="drafts a step", ylabel="v: time by that of a step without drafts")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(nodes, [str(n) for n in nodes])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,8,32", metavar="N,N,..")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of every part [100]")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--nodes", default="", metavar="N,N,..", help="sizes of trees to verify")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    rows = map(int, args.rows.split(","))
    sizes = [int(one) for one in args.nodes.split(",") if one]
    found = {num: measure(num, args.num_threads, args.rounds, sizes) for num in rows}
    if args.plot is not None:
        save_plot(args.plot, found)
    if args.json:
        print(json.dumps(found))
        return
    table = Table(title="ms, and by a plain step's: v of n drafts, c of one")
    chains_and_c = [*(f"v, n = {n}" for n in range(1, MAX_DRAFTS + 1)), "c"]
    for column in ("rows", "plain ms", *([f"{n} nodes" for n in sizes] or chains_and_c)):
        table.add_column(column, justify="right")
    for num, ms in found.items():
        plain, *others = ms.values()
        table.add_row(str(num), f"{plain:.2f}", *(f"{one / plain:.2f}" for one in others))
    Console().print(table)


if __name__ == "__main__":
    main()
