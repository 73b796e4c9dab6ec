"""Engines that decode by turns, step by step, so that other work affects them equally."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from operator import attrgetter

from benchmarks.harness.engines import Bench
from tandem.core.request import Request
from tandem.decode_node.planning.draft_length import DraftLengthPolicy, StepCostModel, adaptive
from tandem.decode_node.planning.step_plan import StepPlan, StepProposal
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.model.loaded import LoadedModel
from tandem.runtime.lockstep import LocalPlanner

PAGE_SIZE = 64
ADAPTIVE = "adaptive"


class Engine:
    """Serves requests endlessly. If ``is_staggered``, the first answers end at different times."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_drafts: int,
        asked: list[Request],
        num_rows: int,
        is_staggered: bool = True,
    ) -> None:
        self._asked, self._num_rows = cycled(asked, num_rows if is_staggered else 0), num_rows
        # A prompt's pages are held twice during its hand-over.
        most = 2 * max(len(one.prompt_ids) for one in asked) + asked[0].sampling.max_tokens
        self.bench = Bench(
            loaded,
            num_drafts=num_drafts,
            draft_length=ADAPTIVE,
            max_rows=num_rows,
            num_pages=1 + num_rows * (-(-most // PAGE_SIZE) + 3),
            page_size=PAGE_SIZE,
            measures=True,
        )
        # trials read page 0; with NaN in it all their rows would be equal
        for cache in self.bench.all_caches():
            cache[0].zero_()
        planner = self.bench.decode._planner
        assert isinstance(planner, LocalPlanner) and isinstance(planner._decide, StepPlanner)
        self.decide, self._is_new = planner._decide, False
        planner._decide = self._plan

    def choose(self, length: DraftLengthPolicy, costs: StepCostModel) -> None:
        """Use this draft-length policy from now on. The engine keeps its table of programs."""
        self.decide._draft_length, self.decide._costs, self._is_new = length, costs, True

    def _plan(self, proposals: Sequence[StepProposal]) -> StepPlan | None:
        """Plan a step. After a change of policy, drop the first report: its step was the old
        policy's."""
        if self._is_new:
            proposals = [replace(one, report=None) for one in proposals]
        self._is_new = False
        return self.decide(proposals)

    def step(self) -> tuple[int, float]:
        """Fill all rows with requests and run a step; return its tokens and seconds."""
        while len(self.bench.decode.scheduler.sequences) < self._num_rows:
            self.bench.start(next(self._asked))
        self.bench.frames.clear()
        began_at = time.perf_counter()
        self.bench.decode.step()
        spent_s = time.perf_counter() - began_at
        return sum(len(update.token_ids) for update in self.bench.updates()), spent_s

    @property
    def num_context(self) -> int:
        """Mean number of known tokens of a row."""
        held = self.bench.decode.scheduler.running
        return sum(one.num_known for one in held) // max(1, len(held))

    def end(self) -> None:
        for identity in [*self.bench.decode.scheduler.sequences]:
            self.bench.decode.drop(identity)
        self.bench.check_empty()


class Arm:
    """One draft-length policy, moved between engines; its cost model is kept."""

    def __init__(self, length: DraftLengthPolicy, engine: Engine) -> None:
        self._draft_length, self.costs = length, engine.decide._costs
        self.rates: list[float] = []
        self.num_tokens, self.spent_s = 0, 0.0
        self.sit(engine)

    def sit(self, engine: Engine) -> None:
        self.engine = engine
        engine.choose(self._draft_length, self.costs)

    def step(self) -> None:
        num, spent_s = self.engine.step()
        self.num_tokens, self.spent_s = self.num_tokens + num, self.spent_s + spent_s


def adaptive_arm(loaded: LoadedModel, depth: int, asked: list[Request], num_rows: int) -> Arm:
    """Return an arm with adaptive length, after its measurements while idle."""
    engine = Engine(loaded, depth, asked, num_rows)
    while engine.bench.decode.has_work():
        engine.bench.decode.step()
    return Arm(adaptive, engine)


def together(arms: Sequence[Arm], num_tokens: int, counts: bool) -> None:
    """Run steps until each arm has ``num_tokens`` tokens.

    The order of arms changes with each call. A step right after a large one finds cold caches and
    takes up to 15 % longer.
    """
    arms = random.Random(num_tokens).sample(arms, len(arms))
    before = [(arm.num_tokens, arm.spent_s) for arm in arms]
    while (arm := min(arms, key=attrgetter("num_tokens"))).num_tokens < num_tokens:
        arm.step()
    for arm, (num, spent_s) in zip(arms, before, strict=True):
        if counts:
            arm.rates.append((arm.num_tokens - num) / (arm.spent_s - spent_s))


def cycled(asked: list[Request], num_early: int) -> Iterator[Request]:
    """Repeat the requests endlessly.

    The first ones are shortened so that they end one after another. Otherwise all rows would stay
    at the same position of their texts.
    """
    for i, one in enumerate(cycle(asked)):
        num = one.sampling.max_tokens
        if i < num_early:
            num = -(-num * (i + 1) // num_early)
        yield replace(one, request_id=f"r{i}", sampling=replace(one.sampling, max_tokens=num))
