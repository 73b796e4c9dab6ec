"""Whole decode steps of several drafters, timed in turns at one number of rows and one context."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track

from benchmarks.harness.engines import Held, load
from benchmarks.harness.held_out import held_out
from benchmarks.harness.turns import PAGE_SIZE, Engine
from benchmarks.regimes.fit import NONE
from tandem.cluster.bench.speculation import fitted_acceptance
from tandem.core.config import TINY_MODEL
from tandem.core.request import Request, SamplingParams
from tandem.decode_node.planning.draft_length import StepCostModel

MTP, FREE, BUDGETS = "mtp", "ngram", (4, 16)
SELF = tuple(f"self {budget}" for budget in BUDGETS)
DRAFTERS, DEPTHS = (FREE, MTP, *SELF), (1, 2, 3)
PLAIN_IN = SELF[0]
"""Drafter whose engine also runs the steps without drafts; it keeps no state of them."""
NUM_WARM, NUM_FIRST, NUM_TIMED = 2, 1, 3
"""Warm-up rounds; first steps of a turn that do not count; timed steps of a turn. The first steps
find cold caches, and the drafter catches up in them with the rows of the previous arm."""
MAX_TOKENS = 1000
ArmName = tuple[str, int]


@dataclass
class Taken:
    """Measurements of an arm's steps."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Mean of the middle half, because outliers affect some arms more than others."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return statistics.fmean(one for one in self.seconds if low <= one <= high)

    @property
    def context(self) -> int:
        return round(statistics.fmean(self.contexts))

    def tokens_of_a_step(self, num_rows: int) -> float:
        return statistics.fmean(self.num_tokens) / num_rows


def read_by(drafter: str, context: int) -> int:
    """Return the number of tokens that drafting reads."""
    _, _, budget = drafter.partition(" ")
    return min(context, int(budget) * PAGE_SIZE) if budget else context


def asked_of(num_rows: int, context: int) -> list[Request]:
    """Return prompts joined from slices of held-out files, as no file has ``context`` tokens."""
    texts = iter(held_out(num_rows * (1 + context // 256), 257, 257, seed=5))
    sampling = SamplingParams(seed=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = []
    for _ in range(num_rows):
        ids: list[int] = []
        while len(ids) < context:
            ids += next(texts)[bool(ids) :]
        prompts.append(ids[:context])
    return [Request(f"r{i}", (*ids,), sampling=sampling) for i, ids in enumerate(prompts)]


def engine_of(drafter: str, num_rows: int, context: int, num_threads: int) -> Engine:
    name, _, budget = drafter.partition(" ")
    sets = ["model.kernels=native", f"decode.num_threads={num_threads}", "model.dtype=bfloat16"]
    sets += [f"speculation.drafter={name}", f"speculation.max_depth={max(DEPTHS)}"]
    sets += [f"speculation.draft_budget_pages={budget}"] if budget else []
    asked = asked_of(num_rows, context)
    return Engine(load(TINY_MODEL, *sets), max(DEPTHS), asked, num_rows, is_staggered=False)


def taken(num_rows: int, context: int, num_rounds: int, num_threads: int) -> dict[ArmName, Taken]:
    """Return measurements by drafter and n.

    After each round all engines advance to the position of the farthest one, so that all arms have
    the same contexts.
    """
    engines = {name: engine_of(name, num_rows, context, num_threads) for name in DRAFTERS}
    arms: list[ArmName] = [(NONE, 0), *((name, n) for name in DRAFTERS for n in DEPTHS)]
    found = {arm: Taken() for arm in arms}
    title = f"{num_rows} rows of {context}"
    for i in track(range(NUM_WARM + num_rounds), title, console=Console(stderr=True)):
        for arm in random.Random(i).sample(arms, len(arms)):
            name, n = arm
            one = turn(engines[PLAIN_IN if name == NONE else name], n)
            if i >= NUM_WARM:
                found[arm].seconds += one.seconds
                found[arm].num_tokens += one.num_tokens
                found[arm].contexts += one.contexts
        level_out([*engines.values()])
    for engine in engines.values():
        engine.end()
    return found


def hold(engine: Engine, num: int) -> None:
    engine.choose(Held(num), StepCostModel.unprofiled(engine.decide._draft_shapes))


def turn(engine: Engine, num: int) -> Taken:
    hold(engine, num)
    one = Taken()
    for i in range(NUM_FIRST + NUM_TIMED):
        context = engine.num_context
        num_tokens, seconds = engine.step()
        if i >= NUM_FIRST:
            one.seconds.append(seconds)
            one.num_tokens.append(num_tokens)
            one.contexts.append(context)
    return one


def level_out(engines: Sequence[Engine]) -> None:
    farthest = max(engine.num_context for engine in engines)
    for engine in engines:
        hold(engine, max(DEPTHS))
        while engine.num_context < farthest:
            engine.step()


def alpha_of(found: dict[ArmName, Taken], drafter: str, num_rows: int) -> float:
    """Return the share of drafts accepted among those that follow accepted ones, averaged over
    n."""
    return statistics.fmean(
        fitted_acceptance(found[drafter, n].tokens_of_a_step(num_rows), n) or 0.0 for n in DEPTHS
    )
