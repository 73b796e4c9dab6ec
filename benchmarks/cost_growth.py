"""How the time of a decode step grows with context, rows, layers and experts, beside its work.

    python -m benchmarks.cost_growth [--axes context,rows,layers,experts] [--plot FILE.png] [--json]

Context and rows grow on the shipped checkpoint, layers and experts on random ones of a shape in
between. Work is counted from the shape: multiplications, and bytes of weights and cache that a
step has to read (of experts, those that random routing would hit). A point is fine if its time has
not grown more than the larger of the two.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.driven.engines import Bench, greedy, load
from benchmarks.driven.held_out import held_out
from benchmarks.versus.checkpoints import SHAPE, write_random
from tandem.core.config import TINY_MODEL
from tandem.model.checkpoint.config import ModelConfig

BYTES = 2
"""Of a weight or cached value in bf16."""
PAGE_SIZE = 64
SMALL: dict[str, Any] = SHAPE | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "moe_intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Point:
    """A step to time; ``shape`` is that of a random checkpoint, None for the shipped one."""

    axis: str
    value: int
    num_rows: int = 1
    context: int = 128
    shape: tuple[tuple[str, int], ...] | None = None


AXES = {
    "context": [Point("context", n, context=n) for n in (128, 512, 1024, 2048, 4096, 8000)],
    "rows": [Point("rows", n, num_rows=n) for n in (1, 2, 4, 8, 16, 32, 64)],
    "layers": [
        Point("layers", n, shape=(("num_hidden_layers", n), ("n_routed_experts", 16)))
        for n in (2, 4, 8, 16)
    ],
    "experts": [
        Point("experts", n, 8, shape=(("num_hidden_layers", 4), ("n_routed_experts", n)))
        for n in (8, 16, 32, 64, 128)
    ],
}


@dataclass(frozen=True)
class Work:
    """Of one step without drafts."""

    multiplications: float
    num_bytes: float


def work_of(config: ModelConfig, num_rows: int, context: int) -> Work:
    """Attention in latent space reads each entry once; weights are read once a step."""
    c, dim, heads = config, config.hidden_size, config.num_attention_heads
    q_in = dim if c.q_lora_rank is None else c.q_lora_rank
    down = dim * (c.latent_dim + (c.q_lora_rank or 0))
    ups = heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    attention = down + q_in * heads * c.qk_head_dim + ups + heads * c.v_head_dim * dim
    latent = heads * context * (c.latent_dim + c.kv_lora_rank)
    expert = 3 * dim * c.moe_intermediate_size
    share = c.num_experts_per_tok / c.n_routed_experts
    num_hit = c.n_routed_experts * (1 - (1 - share) ** num_rows)
    per_row = per_step = float(dim * c.vocab_size)
    for layer in range(c.num_hidden_layers):
        per_row, per_step = per_row + attention + latent, per_step + attention
        if c.is_moe_layer(layer):
            per_row += expert * (c.num_experts_per_tok + c.n_shared_experts)
            per_row += dim * c.n_routed_experts
            per_step += expert * (num_hit + c.n_shared_experts) + dim * c.n_routed_experts
        else:
            per_row, per_step = (one + 3 * dim * c.intermediate_size for one in (per_row, per_step))
    cached = num_rows * context * c.latent_dim * c.num_hidden_layers
    return Work(num_rows * per_row, BYTES * (per_step + cached))


@contextmanager
def bench_of(point: Point, num_threads: int) -> Iterator[tuple[Bench, ModelConfig]]:
    sets = "model.dtype=bfloat16", f"decode.num_threads={num_threads}", "speculation.num_tokens=0"
    num_pages = 4 + 2 * point.num_rows * (point.context // PAGE_SIZE + 4)
    with tempfile.TemporaryDirectory() as folder:
        path = TINY_MODEL
        if point.shape is not None:
            path = Path(folder) / "random"
            write_random(path, SMALL | dict(point.shape))
        loaded = load(path, *sets)
        rows = point.num_rows
        bench = Bench(loaded, 0, rows, PAGE_SIZE, num_pages)
        yield bench, loaded.config


def turn(bench: Bench, point: Point, num_steps: int) -> list[float]:
    """Milliseconds of steps, after two that do not count."""
    [text] = held_out(1, 1000, 1000, seed=5)
    for i in range(point.num_rows):
        prompt = (text[i:] * 9)[: point.context]
        bench.start(greedy(f"r{i}", prompt, num_steps + 4, ignore_eos=True))
    times = []
    for _ in range(num_steps + 2):
        began_at = time.perf_counter()
        bench.decode.step()
        times.append(1e3 * (time.perf_counter() - began_at))
    for i in range(point.num_rows):
        bench.drop(f"r{i}")
    return times[2:]


Found = dict[str, list[dict[str, float]]]
"""By axis, its points: value, ms, and how much ms and both kinds of work are of the first's."""


def measure(names: list[str], num_threads: int, num_rounds: int, bar: Progress) -> Found:
    found: Found = {}
    for name in names:
        points, rows = AXES[name], []
        task = bar.add_task(name, total=len(points))
        for point in points:
            with bench_of(point, num_threads) as (bench, config):
                times = [ms for _ in range(num_rounds) for ms in turn(bench, point, 20)]
                work = work_of(config, point.num_rows, point.context)
            rows.append({"value": point.value, "ms": statistics.median(times), **vars(work)})
            bar.advance(task)
        first = rows[0]
        grown = ("ms", "multiplications", "num_bytes")
        found[name] = [row | {f"x {key}": row[key] / first[key] for key in grown} for row in rows]
    return found


def show(found: Found) -> Table:
    table = Table(title="time of a step beside its work, by the first of each axis")
    for column in ("axis", "value", "ms", "time", "multiplications", "bytes", "time / work"):
        table.add_column(column, justify="right")
    for name, rows in found.items():
        for row in rows:
            growth = [row[f"x {key}"] for key in ("ms", "multiplications", "num_bytes")]
            cells = [f"{one:.2f}" for one in (*growth, growth[0] / max(growth[1:]))]
            table.add_row(name, f"{row['value']:.0f}", f"{row['ms']:.2f}", *cells)
    return table


def save_plot(path: Path, found: Found) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 4), layout="constrained")
    for axes, (name, rows) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        values = [row["value"] for row in rows]
        for key, label in (("ms", "time"), ("multiplications",) * 2, ("num_bytes", "bytes")):
            style = {"linewidth": 3, "color": "black"} if key == "ms" else {"linestyle": "--"}
            axes.plot(values, [row[f"x {key}"] for row in rows], marker="o", label=label, **style)
        axes.set(title=name, xscale="log", yscale="log", xlabel=name)
        axes.set_xticks(values, [f"{value:.0f}" for value in values])
        axes.minorticks_off()
    axes.legend()
    figure.suptitle("growth of a decode step's time and work")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--axes", default=",".join(AXES), metavar="NAME,..", help="[all]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each point [3]")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    if unknown := set(names := args.axes.split(",")) - set(AXES):
        parser.error(f"--axes {', '.join(unknown)}: choose from {', '.join(AXES)}")
    with Progress(console=Console(stderr=True)) as bar:
        found = measure(names, args.num_threads, args.rounds, bar)
    if args.plot is not None:
        save_plot(args.plot, found)
    print(json.dumps(found)) if args.json else Console().print(show(found))


if __name__ == "__main__":
    main()
