"""Check drafts against an oracle: a drafter without a cache must propose the same drafts.

A scripted drafter also forces every acceptance pattern, so that every position is tested.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes
from tandem.core.request import Request
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.step import StepShape, decode_step, draft
from tandem.model.drafters.base import DraftContext, DrafterState, Drafts
from tandem.model.drafters.none import NoDrafter
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch, Segment, pack_segments
from tandem.model.network.cache import MAIN, MTP, Caches

CHAINS = [StepShape(draft_shape, None) for draft_shape in chain_shapes(3)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("drafts")
    tiny.write_tiny(folder, seed=11)
    return load(folder)


def prompt(length: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 90, (length,), generator=generator).tolist()


def fresh_rows(ids: list[int], page_size: int, position_offset: int) -> tuple[Batch, int]:
    num_pages = -(-len(ids) // page_size)
    segment = Segment(ids, 0, list(range(1, num_pages + 1)))
    batch = pack_segments([segment], page_size, torch.device("cpu"))
    return replace(batch, positions_BQ=batch.positions_BQ + position_offset), num_pages + 1


def drafts_from_scratch(loaded: LoadedModel, tokens: list[int], num_drafts: int) -> list[int]:
    """Draft from the whole history without a cache. Runs the main model over all but the last
    token. Then runs the MTP layer over (token i+1, hidden i), and over its own output row by
    row."""
    batch, num_pages = fresh_rows(tokens[:-1], 8, 0)
    [hidden] = loaded.network(batch, loaded.allocate_caches(num_pages + 4, 8))
    ids, drafts = tokens[1:], []
    for _ in range(num_drafts):
        batch, num_pages = fresh_rows(ids, 8, 1)
        output = loaded.drafter.forward(batch, hidden, loaded.allocate_caches(num_pages + 4, 8))
        drafts.append(int(loaded.network.logits(output[-1:]).argmax()))
        ids, hidden = [*ids, drafts[-1]], torch.cat((hidden, output[-1:]))
    return drafts


class Spy:
    """The real drafter; its proposals are recorded."""

    runs_on_host = True

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.drafts: list[list[list[int]]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def draft(
        self,
        state: DrafterState,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        told = state, context, draft_shape, catch_up_width, caches
        drafts = self.inner.draft(*told)  # type: ignore[attr-defined]
        self.drafts.append(drafts.tokens_BN.tolist())
        return drafts


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_cached_drafts_equal_drafts_from_scratch(loaded: LoadedModel, num_drafts: int) -> None:
    spy = Spy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=num_drafts)
    ids = prompt(13)
    first, _ = bench.start(greedy("r", ids, 40, ignore_eos=True))
    known = [*ids, first]
    num_steps = 0
    while bench.decode.has_work():
        bench.decode.step()
        with torch.inference_mode():
            assert spy.drafts[-1][0] == drafts_from_scratch(loaded, known, num_drafts)
        known += bench.frames[-1].updates[0].token_ids
        num_steps += 1
    assert num_steps >= 10
    bench.check_empty()


class Scripted(NoDrafter):
    """Drafts that are right for exactly ``pattern[step]`` positions, then wrong."""

    name = "scripted"

    def __init__(self, answer: list[int], pattern: list[int]) -> None:
        self._answer_T = torch.tensor(answer + [0] * 10)
        self._pattern = torch.tensor(pattern)
        self.num_steps = torch.tensor([0])

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        return chain_shapes(max_depth)

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        places_N, done_1 = torch.arange(draft_shape.depth), context.num_known_B - self.num_prompt
        right_1N = self._answer_T[done_1.unsqueeze(1) + places_N]
        num_right_1 = self._pattern[self.num_steps % len(self._pattern)]
        self.num_steps += 1
        wrong_1N = (right_1N + 1) % 90
        return Drafts(right_1N.where(places_N < num_right_1.unsqueeze(1), wrong_1N))

    num_prompt = 0


@pytest.mark.parametrize("pattern", [[0], [1], [2], [3], [0, 3, 1, 2], [3, 0]])
def test_forced_rejection_at_every_position(loaded: LoadedModel, pattern: list[int]) -> None:
    ids = prompt(10, seed=4)
    [(answer, _)] = Bench(loaded, num_drafts=0).generate(greedy("r", ids, 33, ignore_eos=True))
    drafter = Scripted(answer, pattern)
    drafter.num_prompt = len(ids)
    bench = Bench(replace(loaded, drafter=drafter), num_drafts=3)
    [(tokens, _)] = bench.generate(greedy("r", ids, 33, ignore_eos=True))
    assert tokens == answer
    emitted = [len(frame.updates[0].token_ids) for frame in bench.frames]
    for i, num in enumerate(emitted[:-1]):
        assert num == pattern[i % len(pattern)] + 1
    bench.check_empty()


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_zero_hidden_leaves_pulled_draft_slots_untouched(
    loaded: LoadedModel, num_drafts: int
) -> None:
    """In a batch of first-step rows and later rows, every pulled slot stays byte-identical."""
    bench = Bench(loaded, num_drafts=num_drafts, handover_hidden=False)
    bench.start(greedy("old", prompt(11), 30, ignore_eos=True))
    bench.decode.step()
    bench.start(greedy("new", prompt(21, seed=9), 30, ignore_eos=True))
    new, old = (bench.sequence(name) for name in ("new", "old"))
    before = slots_of(bench, new.pages, 21)
    old_length = 11 + old.num_output
    old_before = slots_of(
        bench, old.pages, old_length - 1 - len(bench.frames[-1].updates[0].token_ids)
    )
    bench.decode.step()
    assert torch.equal(slots_of(bench, new.pages, 21), before)
    assert torch.equal(slots_of(bench, old.pages, len(old_before)), old_before)
    assert before.abs().sum(1).min() > 0


def slots_of(bench: Bench, pages: list[int], num_tokens: int) -> Tensor:
    cache = bench.caches[MTP][0]
    return cache[pages].flatten(0, 1)[:num_tokens].clone()


def test_pass_one_without_suppression_would_spoil_the_pulled_slot(loaded: LoadedModel) -> None:
    """Shows that the test above can fail: an unmarked first row overwrites slot L-2 with
    garbage."""
    bench = Bench(loaded, num_drafts=1, handover_hidden=False)
    bench.start(greedy("r", prompt(12), 9, ignore_eos=True))
    pages = bench.sequence("r").pages
    before = slots_of(bench, pages, 12)
    state = bench.decode._launcher.rows.select(torch.tensor([0]), 3)
    state.state.drafter.is_first_unknown_B[:] = False
    with torch.inference_mode():
        decode_step(loaded, bench.caches, state, StepKey(1, 1, 2), CHAINS[1])
    after = slots_of(bench, pages, 12)
    assert torch.equal(after[:-1], before[:-1]) and not torch.equal(after[-1], before[-1])


def test_poisoned_padding_changes_nothing(loaded: LoadedModel) -> None:
    """Padding rows of pass 1 and the dummy page may hold any finite values."""
    outputs = []
    for poison in (0.0, 1e4, -1e4):
        bench = Bench(loaded, num_drafts=3)
        bench.start(greedy("r", prompt(12), 9, ignore_eos=True))
        state = bench.decode._launcher.rows.select(torch.tensor([0]), 3)
        state.state.drafter.hidden_BMD[:, 1:] = poison
        for cache in bench.all_caches():
            cache[0] = poison
        with torch.inference_mode():
            key = StepKey(1, 3, 4)
            drafts = draft(loaded.drafter, bench.caches, state, key, CHAINS[3].draft_shape)
            output = decode_step(loaded, bench.caches, state, key, CHAINS[3])
        own = output.state.drafter
        outputs.append((drafts.tokens_BN.tolist(), output.outcome, own.hidden_BMD))
    for drafts, outcome, hidden in outputs[1:]:
        assert drafts == outputs[0][0]
        assert torch.equal(outcome.tokens_BE, outputs[0][1].tokens_BE)
        assert torch.equal(hidden, outputs[0][2])


def test_stop_inside_an_accepted_run(loaded: LoadedModel) -> None:
    """Tokens after the stop are dropped from ids and counts."""
    ids = prompt(10, seed=4)
    [(answer, _)] = Bench(loaded, num_drafts=0).generate(greedy("r", ids, 33, ignore_eos=True))
    for stop_at in range(2, 12):
        stop = answer[stop_at]
        expected = answer[: answer.index(stop) + 1]
        drafter = Scripted(answer, [3])
        drafter.num_prompt = len(ids)
        bench = Bench(replace(loaded, drafter=drafter), num_drafts=3)
        request: Request = greedy("r", ids, 33, ignore_eos=True, stop_token_ids=(stop,))
        [(tokens, reason)] = bench.generate(request)
        assert (tokens, reason) == (expected, "stop")
        if len(expected) > 1:
            counts = bench.updates()[-1].counts
            assert counts is not None
            assert sum(len(u.token_ids) for u in bench.updates()) == len(expected) - 1
            assert counts.num_accepted <= len(expected) - 1
        bench.check_empty()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_max_tokens_with_drafts_in_flight(loaded: LoadedModel, max_tokens: int) -> None:
    bench = Bench(loaded, num_drafts=3)
    [(tokens, reason)] = bench.generate(greedy("r", prompt(10), max_tokens, ignore_eos=True))
    assert len(tokens) == max_tokens and reason == "length"
    bench.check_empty()


def test_drafts_may_cross_max_model_len(tmp_path: Path) -> None:
    """The last tokens before the limit equal those of plain decoding, for every number of
    drafts."""
    tiny.write_tiny(tmp_path, seed=12)
    ids = prompt(20)
    answers = []
    for num_drafts in (0, 1, 2, 3):
        bench = Bench(load(tmp_path, "model.max_model_len=32"), num_drafts=num_drafts)
        [(tokens, reason)] = bench.generate(greedy("r", ids, 1000, ignore_eos=True))
        assert (len(tokens), reason) == (12, "length")
        answers.append(tokens)
        bench.check_empty()
    assert answers == [answers[0]] * 4


def test_main_cache_is_the_one_that_is_read(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    bench.start(greedy("r", prompt(12), 9, ignore_eos=True))
    assert bench.caches[MAIN][0].abs().sum() > 0
    bench.drop("r")
    bench.check_empty()
