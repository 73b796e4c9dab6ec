"""A decode step launch by launch, predicted without a device.

    python -m benchmarks.gpu.ledger [--model v2-lite] [--rows 1,32] [--contexts 4096] [--launches]
        [--measured build/gpu/results.jsonl]

The time of a launch is the largest of three terms:

- its bytes, divided by BANDWIDTH x e;
- its multiplications, divided by RATE x e;
- SHORTEST_S.

NODE_S is added unless the launch runs in parallel with another one. If the kernel has a single
staging buffer, the first two terms are added, because loads and products alternate.

The efficiencies e of our kernels follow from their code compiled for Hopper:

- Memory: MOST x min(1, KB in flight on each processor / ENOUGH_KB). A program has all stages but
  one of its shared memory in flight. Without stages it has everything that it reads in flight.
- Multiplications: MOST for wgmma with two or more programs on a processor. One program reaches
  0.6 of that, because its loads, softmax and products alternate. Without wgmma it is 0.4 of that.
  If a product has fewer columns than WIDE, it is reduced in proportion.

Libraries reach MOST in both.
"""

import argparse
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import floors
from benchmarks.gpu.compiled import Compiled, compiled_of
from benchmarks.gpu.launches import NUM_PROCESSORS, Launch, Noted, noted
from benchmarks.gpu.shapes import SHAPES, random_model
from benchmarks.gpu.steps import NUM_DRAFTS, Steps
from benchmarks.gpu.work import Step, hit, work_of
from tandem.model.drafters.none import NoDrafter

BANDWIDTH, RATE = 4.3e12, 7.9e14
"""Measured rates of an H200: bytes copied, and multiplications in bf16."""
MOST, ENOUGH_KB = 0.85, 30
SHORTEST_S, NODE_S = 2e-6, 1.3e-6
WIDE = 32
"""Columns from which on a wgmma is not bound by reading its 64 rows from shared memory."""
SMALL_BYTES = 1 << 20
LONGEST_LOAD = 16 * 1024
"""Maximum bytes that a program without stages has in flight, limited by its registers."""


@dataclass(frozen=True)
class Line:
    """Prediction for one launch. ``of_memory`` and ``of_rate`` are its efficiencies e."""

    launch: Launch
    work: floors.Work
    compiled: Compiled | None
    of_memory: float
    of_rate: float

    @property
    def seconds(self) -> float:
        moving = self.work.num_bytes / (BANDWIDTH * self.of_memory)
        computing = self.work.num_flops / (RATE * self.of_rate)
        take_turns = self.compiled is not None and self.compiled.num_buffers == 1
        longest = moving + computing if take_turns else max(moving, computing)
        return longest if self.launch.is_beside else max(longest, SHORTEST_S) + NODE_S


@cache
def model_of(name: str, in_fp8: bool) -> tuple[Any, Noted]:
    """Build a model of tensors without values."""
    kernels = Noted()
    with FakeTensorMode(), torch.inference_mode():
        kind = torch.device("cpu"), torch.bfloat16
        return random_model(name, *kind, with_mtp=True, in_fp8=in_fp8, kernels=kernels), kernels


@cache
def launches_of(
    name: str, num_rows: int, context: int, num_drafts: int, in_fp8: bool
) -> list[Launch]:
    loaded, kernels = model_of(name, in_fp8)
    if num_drafts == 0:
        loaded = replace(loaded, drafter=NoDrafter())
    mode = next(one.fake_mode for one in loaded.network.parameters())

    def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    with mode, torch.inference_mode(), patch("tandem.model.loaded.allocate_zeros", zeros):
        steps = Steps(loaded, num_rows, context, num_drafts)
        with noted(kernels) as found:
            steps.step()
    return found


def step_of(
    name: str, num_rows: int, context: int, num_drafts: int, in_fp8: bool
) -> tuple[list[Launch], list[floors.Work]]:
    """Return the launches of a step, and the work of each."""
    launches = launches_of(name, num_rows, context, num_drafts, in_fp8)
    step = Step(context, model_of(name, in_fp8)[0].config.num_experts_per_tok)
    return launches, [work_of(one, step) for one in launches]


def line_of(launch: Launch, work: floors.Work) -> Line:
    if launch.kernel is None or launch.grid is None:
        return Line(launch, work, None, MOST, MOST)
    made, num_programs = compiled_of(launch), prod(launch.grid)
    resident = min(made.per_sm, num_programs / NUM_PROCESSORS)
    in_flight = min(LONGEST_LOAD, work.num_bytes / num_programs)
    if stages := launch.given.get("num_stages"):
        in_flight = max(in_flight, made.shared_bytes * (stages - 1) / stages)
    of_memory = MOST * min(1, resident * in_flight / 1024 / ENOUGH_KB)
    of_rate = MOST * (0.4 if not made.wgmma_n else 1 if made.per_sm > 1 else 0.6)
    of_rate *= min(1, (made.wgmma_n or WIDE) / WIDE)
    return Line(launch, work, made, of_memory, of_rate)


def lines_of(
    name: str,
    num_rows: int,
    context: int,
    num_drafts: int,
    in_fp8: bool,
    only: Container[str] | None = None,
) -> list[Line]:
    """Return the predictions for all launches, or only for those named in ``only``."""
    told = zip(*step_of(name, num_rows, context, num_drafts, in_fp8), strict=True)
    return [line_of(*one) for one in told if only is None or one[0].name in only]


def floor_s(name: str, num_rows: int, context: int, num_drafts: int, in_fp8: bool) -> float:
    config = model_of(name, in_fp8)[0].config
    num_moe = sum(map(config.is_moe_layer, range(config.num_hidden_layers)))
    few, many = (
        round(hit(config.n_routed_experts, num_tokens, config.num_experts_per_tok))
        for num_tokens in (num_rows, num_rows * (num_drafts + 1))
    )
    hits = [few] * num_drafts, [many] * num_moe
    work = floors.decode_step(config, num_rows, num_drafts, context, *hits, 1 if in_fp8 else 2)
    return work.floor_s(floors.Rates(BANDWIDTH, RATE))


def main() -> None:
    args, console = _arguments(), Console(width=150)
    measured = _measured(args.measured) if args.measured else {}
    model = f"{args.model}{', FP8' * args.fp8}"
    table = Table(title=f"{model}: a step, predicted")
    for title in ("rows", "context", "n", "launches", "GB", "floor ms", "predicted ms", "by floor"):
        table.add_column(title, justify="right")
    table.add_column("measured ms", justify="right")
    sizes = [*product(args.rows, args.contexts, (0, NUM_DRAFTS))]
    for num_rows, context, n in track(sizes, model, console=Console(stderr=True)):
        at = args.model, num_rows, context, n, args.fp8
        lines, floor = lines_of(*at), floor_s(*at)
        seconds, gigabytes = seconds_of(lines), sum(one.work.num_bytes for one in lines) / 1e9
        what = f"{model}, {num_rows} rows of {context}, n = {n}"
        told = [f"{gigabytes:.2f}", f"{1e3 * floor:.2f}", f"{1e3 * seconds:.2f}"]
        told += [f"{seconds / floor:.2f}", f"{measured[what]:.2f}" if what in measured else ""]
        table.add_row(str(num_rows), str(context), str(n), str(len(lines)), *told)
        if args.launches:
            console.print(_of_launches(what, lines))
    console.print(table)


def numbers(text: str) -> list[int]:
    return [*map(int, text.split(","))]


def _of_launches(what: str, lines: Sequence[Line]) -> Table:
    """Return a table of launches grouped by name, the longest first."""
    table = Table(title=what)
    for title in ("launch", "times", "us", "us each", "MB each", "e memory", "e rate", "per SM"):
        table.add_column(title, justify="right")
    together: dict[str, list[Line]] = {}
    for one in lines:
        is_small = one.compiled is None and one.work.num_bytes < SMALL_BYTES
        name = "small ones of torch" if is_small else one.launch.name
        together.setdefault(name + " beside" * one.launch.is_beside, []).append(one)
    for name, alike in sorted(together.items(), key=lambda pair: -seconds_of(pair[1])):
        us, num, first = 1e6 * seconds_of(alike), len(alike), alike[0]
        megabytes = sum(one.work.num_bytes for one in alike) / num / 1e6
        told = [f"{us:.0f}", f"{us / num:.1f}", f"{megabytes:.2f}"]
        told += [f"{first.of_memory:.2f}", f"{first.of_rate:.2f}"]
        fits = "" if first.compiled is None else str(first.compiled.per_sm)
        table.add_row(name, str(num), *told, fits)
    return table


def seconds_of(lines: Sequence[Line]) -> float:
    return sum(one.seconds for one in lines)


def _measured(path: Path) -> dict[str, float]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {one["what"]: one["ms"] for one in lines if one["section"] == "steps" and "ms" in one}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="v2-lite", choices=SHAPES, help="[v2-lite]")
    add("--fp8", action="store_true", help="use block-scaled FP8 weights")
    add("--rows", type=numbers, default="1,8,32,64,128", metavar="N,..")
    add("--contexts", type=numbers, default="1024,4096", metavar="N,..")
    add("--launches", action="store_true", help="also list each kind of launch")
    add("--measured", type=Path, metavar="FILE", help="results of benchmarks.gpu to show")
    return parser.parse_args()


if __name__ == "__main__":
    main()
