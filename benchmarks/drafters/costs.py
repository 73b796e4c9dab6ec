"""Costs of drafters: times of the parts of a step, time per token, and bytes."""

import statistics
import time
from collections import defaultdict
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from benchmarks.accepted_length import requests
from benchmarks.draft_length import NONE, ROUND_TOKENS, measure
from benchmarks.drafters.arms import CHAIN, Arm
from benchmarks.harness.engines import Bench, Held, greedy
from benchmarks.harness.held_out import held_out
from benchmarks.harness.turns import ADAPTIVE, Engine, together
from benchmarks.harness.turns import Arm as Turned
from tandem.core.config import TINY_MODEL
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.step import draft, verify
from tandem.model.drafters.base import Drafts
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import MAIN
from tandem.model.network.layers import Rope
from tandem.model.network.tree import build_tree

NUM_WARM, ROUNDS, MAX_TOKENS = 30, {1: 168, 8: 42, 32: 42}, 300
"""Warm-up rounds; measured rounds by number of rows; maximum tokens of an answer. The warm-up has
more than 256 steps, until which batch sizes count as new."""


def bytes_of(loaded: LoadedModel) -> dict[str, int]:
    """Return the bytes of the drafter's weights, its cache per token, and its hand-over
    features."""
    size = loaded.dtype.itemsize
    own = [group for group in loaded.cache_groups if group.name != MAIN]
    return {
        "weights": sum({t.data_ptr(): t.nbytes for t in held(loaded)}.values()),
        "cache_per_token": size * sum(group.num_layers * group.width for group in own),
        "features": size * loaded.drafter.num_handover_features,
    }


def held(loaded: LoadedModel) -> list[Tensor]:
    """Return the tensors of the drafter's modules, except those shared with the main model."""
    shared = {id(part) for part in loaded.network.modules()}
    found, seen, left = [], set(shared), [loaded.drafter]
    while left:
        one: Any = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif id(one) not in seen and not isinstance(one, Rope):
            seen.add(id(one))
            inner = vars(one).values() if hasattr(one, "__dict__") else ()
            left += (
                one
                if isinstance(one, list | tuple)
                else one.values()
                if isinstance(one, dict)
                else inner
            )
    tables = {t.data_ptr() for t in (loaded.network.rope.cos_TR, loaded.network.rope.sin_TR)}
    mine = {
        t.data_ptr()
        for part in loaded.network.modules()
        for t in vars(part).values()
        if isinstance(t, Tensor)
    }
    mine |= {t.data_ptr() for t in loaded.network.state_dict().values()}
    return [t for t in found if t.data_ptr() not in tables | mine]


@torch.inference_mode()
def parts(arm: Arm, num_rows: int, num_threads: int, rounds: int = 60) -> dict[str, float]:
    """Return v and c: times of verifying and of making drafts CHAIN deep, divided by a plain step.

    If the arm drafts trees, v is that of a tree of two chains.
    """
    loaded, depth = arm.loaded(CHAIN), CHAIN
    level = loaded.drafter.draft_shapes(depth)[-1]
    bench = Bench(
        loaded, num_drafts=depth, max_rows=num_rows, num_pages=1 + 9 * num_rows, page_size=64
    )
    loaded.kernels.use_threads(num_threads)
    for i, ids in enumerate(held_out(num_rows, 128, 129, seed=3)):
        bench.start(greedy(f"r{i}", ids, 200, ignore_eos=True))
    rows, read_B = bench.decode._launcher.rows, torch.arange(num_rows)
    amount = loaded.drafter.catch_up(depth).catch_up_width(depth, 1)

    def verified(num: int) -> Any:
        drafts = Drafts(torch.arange(num_rows * num).view(num_rows, num) + 50)
        parents = torch.arange(-1, num - 1).clamp(min=0).expand(num_rows, num)
        tree = build_tree(parents, depth) if num > depth else None

        def part(read_B: Tensor) -> tuple[Tensor]:
            *_, logits = verify(loaded, bench.caches, rows.select(read_B, None), drafts, tree)
            return (logits.argmax(-1),)

        return part

    def drafted(read_B: Tensor) -> tuple[Tensor]:
        key = StepKey(num_rows, depth, catch_up=amount)
        selected = rows.select(read_B, None)
        return (draft(loaded.drafter, bench.caches, selected, key, level).tokens_BN,)

    made = {"plain": verified(0), "verify": verified(level.num_nodes), "draft": drafted}
    functions = {name: loaded.kernels.make_replayable(one) for name, one in made.items()}
    times = defaultdict(list)
    for _ in range(rounds):
        for name, function in functions.items():
            began_at = time.perf_counter()
            function(read_B)
            times[name].append(time.perf_counter() - began_at)
    found = {name: statistics.median(values[2:]) for name, values in times.items()}
    return {"v": found["verify"] / found["plain"], "c": found["draft"] / found["plain"]}


def beside_best(rates: list[float], held: list[list[float]]) -> list[float]:
    """Return ``rates`` of each round divided by those of the best fixed shape.

    The best shape of odd rounds is used for even rounds, and vice versa. Otherwise the luckiest of
    many equal shapes would count as the best of its own rounds.
    """
    halves = [[statistics.median(one[half::2]) for one in held] for half in (0, 1)]
    best = [half.index(max(half)) for half in halves]
    return [rate / held[best[1 - i % 2]][i] for i, rate in enumerate(rates)]


def speeds(arm: Arm, num_rows: int, num_threads: int) -> dict[str, Any]:
    """Return the time per token of each draft shape and of adaptive length.

    Times are divided by those of an engine with the same weights and no drafter. Engines take turns
    step by step. Figures are medians over rounds. ``adaptive_of_best`` compares with the best shape
    (``beside_best``), and ``error`` is the standard error of its mean.
    """
    loaded = arm.loaded(None, f"decode.num_threads={num_threads}")
    asked, levels = requests(TINY_MODEL, 100, MAX_TOKENS), loaded.drafter.draft_shapes(arm.depth)
    rates = measure(loaded, arm.depth, asked, num_rows, NUM_WARM, ROUNDS[num_rows])

    def by(name: str, other: str) -> list[float]:
        """Return the time per token of one arm divided by another's, round by round."""
        return [b / a for a, b in zip(rates[name], rates[other], strict=True)]

    held = [*map(str, range(len(levels)))]
    of_best = beside_best(rates[ADAPTIVE], [rates[name] for name in held])
    return {
        "of_none": statistics.median(by(ADAPTIVE, NONE)),
        "held_of_none": [statistics.median(by(name, NONE)) for name in held],
        "nodes": [level.num_nodes for level in levels],
        "adaptive_of_best": statistics.median(of_best),
        "error": statistics.stdev(of_best) / len(of_best) ** 0.5,
    }


def beside(arm: Arm, other: Arm, num_rows: int, num_threads: int) -> dict[str, float]:
    """Return the time per token of CHAIN-long chains, divided by another drafter's.

    Both run in turns in one process. Returns the median over rounds and the error of the mean.
    """
    asked = requests(TINY_MODEL, 100, MAX_TOKENS)

    def turned(one: Arm) -> Turned:
        loaded = one.loaded(None, f"decode.num_threads={num_threads}")
        return Turned(Held(CHAIN), Engine(loaded, one.depth, asked, num_rows))

    both = [turned(one) for one in (other, arm)]
    for i in range(NUM_WARM + ROUNDS[num_rows]):
        together(both, (i + 1) * num_rows * ROUND_TOKENS, counts=i >= NUM_WARM)
    for one in both:
        one.engine.end()
    ratios = [*map(truediv, *(one.rates for one in both))]
    return {
        "time": statistics.median(ratios),
        "error": statistics.stdev(ratios) / len(ratios) ** 0.5,
    }
