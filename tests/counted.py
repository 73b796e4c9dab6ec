"""Record what the program of a decode step calls, allocates and copies.

    python -m tests.counted --write

A refactoring leaves every figure in tests/data/step_counts.json as it is.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import TINY_MODEL
from tandem.core.request import REJECTION, Request, Speculation
from tandem.model.kernels.recorded import Recorded

PATH = Path(__file__).parent / "data" / "step_counts.json"
COPIES = (
    *("_to_copy", "cat", "clone", "constant_pad_nd", "contiguous", "flatten", "gather", "index"),
    *("index_select", "pad", "scatter", "stack", "to", "where"),
)
"""Operators that copy values, counted only if their output is not a view."""
WRITES = "copy_", "index_copy_", "index_put_"
"""Operators that write their last tensor argument into another tensor."""
KINDS = "greedy", "top-p", "log probabilities", "rejection"
NUM_ROWS, LENGTH = 4, 70


class Counts(TorchDispatchMode):
    """Counts of called operators, allocated tensors and their bytes, and copied bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_allocated = self.num_bytes = self.num_copied_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.calls[name] += 1
        given = [one for one in tree_leaves(args) if is_tensor(one)]
        held = {one.untyped_storage().data_ptr() for one in given}
        for one in filter(is_tensor, tree_leaves(out)):
            if one.untyped_storage().data_ptr() not in held:
                self.num_allocated += 1
                self.num_bytes += one.nbytes
                self.num_copied_bytes += one.nbytes if name in COPIES else 0
        self.num_copied_bytes += given[-1].nbytes if name in WRITES else 0
        return out


@contextmanager
def counted() -> Iterator[Counts]:
    with Counts() as counts:
        yield counts


def asked(kind: str, name: str, prompt: list[int]) -> Request:
    request = greedy(name, prompt, 9, ignore_eos=True)
    match kind:
        case "top-p":
            sampling = replace(request.sampling, temperature=0.8, top_p=0.9, seed=5)
        case "log probabilities":
            sampling = replace(request.sampling, logprobs=5)
        case "rejection":
            sampling = replace(request.sampling, temperature=0.8, seed=5)
            request = replace(request, speculation=Speculation(acceptance=REJECTION))
        case _:
            sampling = request.sampling
    return replace(request, sampling=sampling)


def step_of(
    num_rows: int, num_drafts: int, length: int, kind: str = "greedy"
) -> tuple[Counts, Recorded]:
    """Run a step of the shipped checkpoint. Return the counts of its Python calls, and its
    recording."""
    loaded = load(TINY_MODEL, f"speculation.max_depth={num_drafts}", "model.kernels=native")
    bench = Bench(loaded, num_drafts=num_drafts, max_rows=num_rows, page_size=64, num_pages=100)
    for i in range(num_rows):
        bench.start(asked(kind, f"r{i}", [7 + k % 90 for k in range(length)]))
    bench.decode.step()
    programs = bench.decode.programs
    [(key, play)] = programs.functions.values()
    assert isinstance(play, Recorded)
    read_B, write_B = bench.decode._launcher.rows.row_indices(list(range(num_rows)), num_rows)
    with counted() as counts:
        programs._compute(key, None, read_B, write_B)
    return counts, play


def figures(kind: str, num_drafts: int) -> dict[str, Any]:
    with torch.inference_mode():
        counts, play = step_of(NUM_ROWS, num_drafts, LENGTH, kind)
    return {
        "played": len(play.operators),
        "calls": dict(sorted(counts.calls.items())),
        "allocated": counts.num_allocated,
        "allocated bytes": counts.num_bytes,
        "copied bytes": counts.num_copied_bytes,
    }


def all_figures() -> dict[str, dict[str, Any]]:
    """Return the figures by kind of rows and number of drafts."""
    return {
        f"{kind}, {num_drafts} drafts": figures(kind, num_drafts)
        for kind in KINDS
        for num_drafts in (0, 3)
    }


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    PATH.write_text(json.dumps(all_figures(), indent=1) + "\n")
