"""Parts of a decode step, timed in turns at one number of rows and one context."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.draft_length import Engine
from benchmarks.driven.engines import Held
from benchmarks.regimes.fit import MTP_DRAFT, REST, SELF_DRAFT, VERIFY, Times
from core.levels import chains
from decode_node.planning.lengths import Costs
from decode_node.planning.step_plan import StepKey
from decode_node.program.step import draft, verify
from model.drafters.base import Drafter, Drafts
from model.drafters.sparse import SparseDrafter

ROUNDS, NUM_FIRST, NUM_PLAIN = 26, 2, 40


def undisturbed(times: Sequence[float]) -> float:
    """Their lower quartile: other work only adds to them."""
    return statistics.quantiles(times, n=4)[0]


def plain_step_s(engine: Engine) -> float:
    engine.choose(Held(0), Costs.unknown(engine.decide._levels))
    return undisturbed([engine.step()[1] for _ in range(NUM_PLAIN)])


@torch.inference_mode()
def times_of(
    engine: Engine, num_rows: int, context: int, depths: Sequence[int], budgets: Sequence[int]
) -> list[Times]:
    """Verifying 0 and more drafts, making them by the engine's own drafter and by the model itself
    over each budget, and what a whole step without drafts takes besides."""
    bench, loaded = engine.bench, engine.bench.loaded
    engine.choose(Held(min(depths)), Costs.unknown(engine.decide._levels))
    engine.step()  # rows have begun, and are behind by what so few drafts leave
    rows, read_B = bench.decode._launcher.rows, torch.arange(num_rows)
    page_size = bench.page_size

    def verified(num: int) -> Callable[[Tensor], tuple[Tensor]]:
        drafts = Drafts(torch.arange(num_rows * num).view(num_rows, num) + 50)

        def part(read_B: Tensor) -> tuple[Tensor]:
            *_, logits = verify(loaded, bench.caches, rows.select(read_B, None), drafts)
            return (logits.argmax(-1),)

        return part

    def drafted(drafter: Drafter, num: int) -> Callable[[Tensor], tuple[Tensor]]:
        key = StepKey(num_rows, num, drafter.catch_up(max(depths)).amount(num, 1))

        def part(read_B: Tensor) -> tuple[Tensor]:
            selected, level = rows.select(read_B, None), chains(num)[-1]
            return (draft(drafter, bench.caches, selected, key, level).tokens_BN,)

        return part

    made = {(VERIFY, context, num): verified(num) for num in (0, *depths)}
    for num in depths:
        made[MTP_DRAFT, context, num] = drafted(loaded.drafter, num)
        for budget in budgets:
            sparse = SparseDrafter(loaded.network, budget)
            read = min(context, budget * page_size)
            made[SELF_DRAFT, read, num] = drafted(sparse, num)
    functions = {what: loaded.kernels.repeated(one) for what, one in made.items()}
    times = defaultdict(list)
    for _ in range(ROUNDS):
        for what, function in functions.items():
            began_at = time.perf_counter()
            function(read_B)
            times[what].append(time.perf_counter() - began_at)
    found = {what: undisturbed(values[NUM_FIRST:]) for what, values in times.items()}
    rest_s = max(plain_step_s(engine) - found[VERIFY, context, 0], 1e-5)
    told = [Times(part, num_rows, read, num, s) for (part, read, num), s in found.items()]
    return [*told, Times(REST, num_rows, context, 0, rest_s)]
