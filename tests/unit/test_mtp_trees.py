"""Draft trees of the MTP layer. Each step drafts the result of a search without a cache, and
answers equal those without drafts."""

from dataclasses import replace
from heapq import nlargest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.draft_shapes import DraftShape
from tandem.core.request import STRICT, Request, SamplingParams
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.step import draft
from tandem.model.drafters.base import Drafts
from tandem.model.drafters.beams import Candidates, select_tree
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import MTP
from tandem.model.network.tree import Tree
from tandem.model.sampling.acceptance import top_candidates
from tandem.model.sampling.adjust import no_rules, set_rules
from tandem.model.sampling.sampler import draw
from tests.trees import path_to
from tests.unit.test_drafts import Spy, fresh_rows, prompt
from tests.unit.test_sampling import sampling_rows

TREE = ("speculation.max_tree_nodes=9", "speculation.max_depth=3", "speculation.top_k=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp_trees")
    tiny.write_tiny(folder, seed=11)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder, *TREE)


class TreeSpy(Spy):
    """Records whole drafts."""

    def draft(self, **inputs: Any) -> Drafts:  # type: ignore[override]
        drafts: Drafts = self.inner.draft(**inputs)  # type: ignore[attr-defined]
        self.drafts.append(drafts)  # type: ignore[arg-type]
        return drafts


def predictions(loaded: LoadedModel, tokens: list[int], path: list[int]) -> Tensor:
    """Return the log probabilities of the draft after ``path``, from the whole text without a
    cache."""
    batch, num_pages = fresh_rows(tokens[:-1], 8, 0)
    [hidden] = loaded.network(batch, loaded.allocate_caches(num_pages + 4, 8))
    ids = tokens[1:]
    for token in [*path, None]:
        batch, num_pages = fresh_rows(ids, 8, 1)
        output = loaded.drafter.forward(batch, hidden, loaded.allocate_caches(num_pages + 4, 8))
        ids, hidden = [*ids, token], torch.cat((hidden, output[-1:]))
    return loaded.network.logits(output[-1:])[0].log_softmax(0)


def search(loaded: LoadedModel, tokens: list[int], num_nodes: int, top_k: int) -> set[tuple]:
    """Return the paths of the ``num_nodes`` best nodes that a beam search of width ``top_k``
    visits."""
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(3):
        here = []
        for score, path in beam:
            best = predictions(loaded, tokens, [*path]).topk(top_k)
            more = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            here += [(score + value, (*path, token)) for value, token in more]
        found += here
        beam = nlargest(top_k, here)
    return {path for _, path in nlargest(num_nodes, found)}


def paths_of(drafts: Drafts) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each node of the first row."""
    assert drafts.parents_BN is not None
    parents = (*drafts.parents_BN[0].tolist(),)
    tokens = drafts.tokens_BN[0].tolist()
    return [
        tuple(tokens[n - 1] for n in path_to(parents, node)) for node in range(1, len(tokens) + 1)
    ]


def test_drafts_are_those_of_a_search_without_caches(loaded: LoadedModel) -> None:
    """Compare in every step. No node comes before its parent."""
    spy = TreeSpy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), page_size=4)
    ids = prompt(13)
    first, _ = bench.start(greedy("r", ids, 12, ignore_eos=True))
    known = [*ids, first]
    num_depths = set()
    while bench.decode.has_work():
        bench.decode.step()
        paths = paths_of(spy.drafts[-1])  # type: ignore[arg-type]
        with torch.inference_mode():
            assert {*paths} == search(loaded, known, 9, 3)
        assert all(path[:-1] in [(), *paths[:i]] for i, path in enumerate(paths))
        num_depths.add(max(map(len, paths)))
        known += bench.frames[-1].updates[0].token_ids
    assert 3 in num_depths
    bench.check_empty()


def test_a_beam_of_one_drafts_the_chain(folder: Path, loaded: LoadedModel) -> None:
    """Compare the tokens in every step, also for sampled rows and rows with logit rules."""
    told = []
    for sets in ((), ("speculation.max_tree_nodes=3", "speculation.top_k=1")):
        loaded = load(folder, *sets)
        spy = TreeSpy(loaded.drafter)
        bench = Bench(replace(loaded, drafter=spy))
        asked = [greedy(f"r{i}", prompt(9 + i), 25, ignore_eos=True) for i in range(3)]
        hot = replace(asked[1].sampling, temperature=0.9, seed=3)
        ruled = replace(hot, repetition_penalty=1.7, presence_penalty=0.6)
        asked[1:] = [replace(asked[1], sampling=hot), replace(asked[2], sampling=ruled)]
        bench.generate(*asked)
        drafts = [one.tokens_BN.tolist() for one in spy.drafts]  # type: ignore[attr-defined]
        told.append((drafts, [frame.updates for frame in bench.frames]))
    assert told[0][0] == told[1][0] and len(told[0][0]) > 8


def test_each_level_has_the_first_nodes_of_the_next(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    levels = loaded.drafter.draft_shapes(3)
    assert [(one.num_nodes, one.depth) for one in levels] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (4, 3),
        (9, 3),
    ]
    bench.start(greedy("r", prompt(12), 9, ignore_eos=True))
    state = bench.decode._launcher.rows.select(torch.tensor([0]), None)
    with torch.inference_mode():
        drafted = [
            draft(loaded.drafter, bench.caches, state, StepKey(1, i, 4), level)
            for i, level in enumerate(levels)
        ]
    whole = paths_of(drafted[-1])
    for level, drafts in zip(levels[1:], drafted[1:], strict=True):
        assert paths_of(drafts) == whole[: level.num_nodes]
    bench.drop("r")


def test_what_a_beam_writes_lies_behind_the_text_on_pages_of_the_row(loaded: LoadedModel) -> None:
    """The beam's writes follow the text, up to the model's end. Writes before them are tokens that
    waited for pass 1."""
    loaded = replace(loaded, max_model_len=40)
    bench = Bench(loaded, page_size=2)
    bench.start(greedy("r", prompt(12), 100, ignore_eos=True))
    cache, num_steps = bench.caches[MTP][0], 0
    while bench.decode.has_work():
        known, before = 12 + bench.sequence("r").num_output, cache.clone()
        pages = bench.sequence("r").pages
        bench.decode.step()
        changed = (cache != before).any(2).nonzero().tolist()
        slots = [pages.index(page) * 2 + offset for page, offset in changed if page]
        assert [slot for slot in sorted(slots) if slot >= known - 1] == [
            *range(known - 1, known + 5)
        ]
        assert min(slots) >= known - 1 - 4
        num_steps += 1
    assert num_steps > 8
    bench.check_empty()


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (("speculation.max_tree_nodes=13", "speculation.top_k=2"), "at most 10 nodes with"),
        (("speculation.max_depth=8", "speculation.top_k=10"), "use at most 9 with"),
        (("speculation.max_tree_nodes=64",), "max_tree_nodes"),
        (("speculation.top_k=0",), "top_k"),
    ],
)
def test_trees_that_cannot_be_are_refused(folder: Path, sets: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load(folder, *TREE, *sets)


def test_ranks_of_sampled_rows_are_what_they_would_choose() -> None:
    """The first candidate is the token that the row draws, the second the one it draws without the
    first, and so on. Penalties include the path before the node."""
    asked = SamplingParams(temperature=0.7, seed=9, presence_penalty=2.0)
    rules = no_rules(1, 12, torch.device("cpu"))
    set_rules(rules, 0, Request("r", (1, 2), sampling=asked), (3,), ())
    one_B, drafts_BM = torch.tensor([1]), torch.tensor([[4, 5, 6]])
    bits_BQ = torch.tensor([[0b0011, 0b1101]])
    nodes = Tree(bits_BQ, torch.tensor([[1, 2]]), bits_BQ, 2)
    logits_BQV = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(2))
    rows = replace(sampling_rows(asked, one_B), rules=rules)
    of = logits_BQV, rows, one_B, drafts_BM, nodes
    tokens_BQK, log_probs_BQK, scores_BQK, *_ = top_candidates((STRICT,), one_B, *of, 5)
    for place, (path, index) in enumerate([((4,), 2), ((5, 6), 3)]):
        left_V = logits_BQV[0, place].clone()
        left_V[[3, *path]] -= 2.0
        plain = replace(rows, rules=None)
        for token in tokens_BQK[0, place].tolist():
            assert draw(left_V.unsqueeze(0), plain, torch.tensor([index])).item() == token
            left_V[token] = float("-inf")
    assert torch.equal(log_probs_BQK, log_probs_BQK.sort(2, descending=True).values)
    assert torch.equal(log_probs_BQK, scores_BQK)


def test_candidates_of_equal_scores_stay_behind_their_parents() -> None:
    """Candidates with equal scores follow their parents, also if all scores are infinite."""
    infinite = torch.full((1, 4), float("-inf"))
    last = infinite, infinite, None
    first = Candidates(torch.tensor([[1, 2, 3, 4]]), torch.zeros(1, 4).long(), *last)
    more = Candidates(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 1, 3, 4]]), *last)
    drafts = select_tree([first, more], 7)
    assert drafts.tokens_BN.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert drafts.parents_BN is not None and drafts.parents_BN.tolist() == [[0, 0, 0, 0, 1, 1, 3]]
    assert DraftShape(7, 2, None).num_slots == 8
