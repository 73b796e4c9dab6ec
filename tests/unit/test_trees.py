"""Draft trees: the nodes that a node sees, and the path that is accepted. Answers and caches equal
those of decoding without drafts, bit for bit with native kernels."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.draft_shapes import (
    MAX_NODES,
    DraftShape,
    chain_shapes,
    max_usable_shape,
    num_slots_ahead,
)
from tandem.core.request import (
    REJECTION,
    RELAXED,
    RELAXED_LOG_PROBS,
    Request,
    SamplingParams,
    Speculation,
)
from tandem.decode_node.planning.acceptance_stats import DepthTransitions
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import visible_slots
from tandem.model.network.cache import MAIN
from tandem.model.network.tree import build_tree
from tandem.model.sampling.acceptance import paths
from tandem.model.sampling.acceptance.base import AcceptanceRows, VerifyInput
from tandem.model.sampling.thinking import thinking_before
from tests.small import write_small
from tests.trees import HiddenChain, Parents, ScriptedTree, level_of, path_to, shapes
from tests.unit.test_drafts import prompt
from tests.unit.test_sampling import sampling_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    write_small(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder, "model.kernels=native")


def random_shapes(num: int, most: int = MAX_NODES) -> list[Parents]:
    draw = random.Random(4)
    sizes = [draw.randint(6, most) for _ in range(num)]
    return [tuple(draw.randint(max(0, i - 5), i) for i in range(size)) for size in sizes]


@pytest.mark.parametrize("parents", [*shapes(4), *random_shapes(20)])
def test_who_lies_behind_whom(parents: Parents) -> None:
    level = level_of(parents)
    tree = build_tree(torch.tensor([parents, parents]), level.depth)
    for node in range(len(parents) + 1):
        path = path_to(parents, node)
        assert tree.depth_BQ[1, node] == len(path)
        bits = int(tree.bits_BQ[1, node]) % (1 << 64)
        assert bits == sum(1 << one for one in [0, *path])
        seen_S = visible_slots(torch.tensor([[5]]), 80, tree.bits_BQ[1:, node : node + 1])[0, 0]
        assert seen_S.nonzero().flatten().tolist() == [*range(6), *(5 + one for one in path)]


def run(
    loaded: LoadedModel, ids: list[int], num: int, num_drafts: int = 3
) -> tuple[list[int], list[int], list[Tensor]]:
    """Return the answer, the number of tokens of each step, and the main cache entries of known
    tokens."""
    bench = Bench(loaded, num_drafts=num_drafts, page_size=4)
    first, _ = bench.start(greedy("r", ids, num, ignore_eos=True))
    told, emitted, pages = [first], [], []
    while bench.decode.has_work():
        pages = bench.sequence("r").pages
        bench.decode.step()
        [update] = bench.frames[-1].updates
        told += update.token_ids
        emitted.append(len(update.token_ids))
    bench.check_empty()
    known = len(ids) + num - 1
    caches = [cache[pages].flatten(0, 1)[:known] for cache in bench.caches[MAIN]]
    return told, emitted, caches


SHAPES = [shape for num in (1, 2, 3) for shape in shapes(num)]
SOME = random.Random(2).sample(shapes(5), 6) + random_shapes(3, 20)


@pytest.mark.parametrize("runs_on_host", [False, True])
@pytest.mark.parametrize(
    "parents",
    [
        *SHAPES,
        *SOME,
        *(pytest.param(one, marks=pytest.mark.slow) for one in shapes(4) + shapes(5)),
    ],
)
def test_every_path_of_a_tree(loaded: LoadedModel, parents: Parents, runs_on_host: bool) -> None:
    """Each end in turn is accepted. The number of tokens, the tokens and the bits in the caches are
    right."""
    ids, ends = prompt(10, seed=4), list(range(len(parents) + 1))
    expected, _, plain = run(loaded, ids, 40, num_drafts=0)
    drafter = ScriptedTree(expected, len(ids), parents, ends, fed=runs_on_host)
    told, emitted, caches = run(replace(loaded, drafter=drafter), ids, 40)
    assert told == expected
    for i, num in enumerate(emitted[:-1]):
        assert num == 1 + len(path_to(parents, ends[i % len(ends)]))
    assert all(map(torch.equal, caches, plain))


def everything(prompts: Sequence[list[int]] | None = None) -> list[Request]:
    """Return strict requests that together use all sampling options."""
    prompts = prompts or [list(range(5 + i, 25)) for i in range(6)]
    asked = [greedy(f"r{i}", ids, 50, ignore_eos=True) for i, ids in enumerate(prompts)]
    hot = replace(asked[0].sampling, temperature=0.8, top_p=0.9, seed=5)
    ruled = replace(asked[0].sampling, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=45)
    asked[1] = replace(asked[1], sampling=replace(hot, logprobs=0))
    asked[2] = replace(asked[2], sampling=replace(ruled, logprobs=2, ignore_eos=False))
    asked[3] = replace(asked[3], sampling=replace(hot, frequency_penalty=1.0, logprobs=1))
    asked[4] = replace(asked[4], speculation=Speculation(2))
    return asked


def hidden_chain(loaded: LoadedModel, *, fed: bool = False) -> LoadedModel:
    assert isinstance(loaded.drafter, MtpDrafter)
    drafter = HiddenChain(loaded.drafter._network, loaded.drafter._layer)
    drafter.runs_on_host = fed  # type: ignore[misc]
    return replace(loaded, drafter=drafter)


def answers(loaded: LoadedModel, asked: list[Request], **more: object) -> tuple[list, Bench]:
    bench = Bench(loaded, max_rows=6, **more)  # type: ignore[arg-type]
    firsts = bench.start_all(*asked)
    bench.frames.clear()
    while bench.decode.has_work():
        bench.decode.step()
    bench.check_empty()
    told: dict[str, list] = {name: [first] for name, (first, _) in firsts.items()}
    for update in bench.updates():
        told[update.identity.request_id] += zip(
            update.token_ids, update.logprobs or [None] * len(update.token_ids), strict=True
        )
    return [told[request.request_id] for request in asked], bench


@pytest.mark.parametrize("runs_on_host", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_strict_answers_are_those_without_drafts_whatever_rows_ask_for(
    loaded: LoadedModel, overlap: bool, runs_on_host: bool
) -> None:
    """Tokens and log probabilities are equal, bit for bit."""
    expected, _ = answers(loaded, everything(), num_drafts=0)
    told, bench = answers(hidden_chain(loaded, fed=runs_on_host), everything(), overlap=overlap)
    assert told == expected
    counts = [one.counts for one in bench.updates() if one.counts is not None]
    whole = [one.num_nodes == 9 * one.num_steps for one in counts]
    assert whole.count(False) == 1, "but for the limited row once it is alone"
    assert sum(one.num_accepted for one in counts) > sum(one.num_steps for one in counts) / 2
    limited = counts[whole.index(False)]
    assert 0 < limited.num_accepted <= limited.num_drafted == 2 * limited.num_steps


def test_a_small_pool_and_the_end_of_the_model(loaded: LoadedModel) -> None:
    """Rows are preempted, and trees reach beyond the last page. The tokens are the same."""
    asked = everything()
    expected, _ = answers(loaded, asked, num_drafts=0)
    ends, _ = answers(replace(loaded, max_model_len=40), [asked[0]], num_drafts=0)
    told, _ = answers(replace(hidden_chain(loaded), max_model_len=40), [asked[0]], page_size=4)
    assert told == ends and len(ends[0]) < len(expected[0])


def test_relaxed_rows_take_the_deepest_path(loaded: LoadedModel) -> None:
    """While thinking, a top n of the whole vocabulary accepts the longest branch, whatever its
    tokens."""
    thinking = replace(loaded, think_ids=(3, 4))
    ids = [3, *range(5, 20)]
    parents = (0, 0, 2, 1, 3)
    everybody = replace(
        greedy("r", ids, 30, ignore_eos=True), speculation=Speculation(None, RELAXED, 2048, 1.0)
    )
    drafter = ScriptedTree([7] * 40, len(ids), parents, [0], fed=False)
    bench = Bench(replace(thinking, drafter=drafter), page_size=4)
    bench.start(everybody)
    bench.frames.clear()
    while bench.decode.has_work():
        bench.decode.step()
    emitted = [len(frame.updates[0].token_ids) for frame in bench.frames]
    assert emitted[:-1] == [4] * (len(emitted) - 1), "nodes 2, 3, 5"


def test_a_node_thinks_as_its_path_says() -> None:
    """Over random trees and texts, the phase before each draft equals that of its path as a
    chain."""
    draw = random.Random(5)
    for parents in random_shapes(30, 16):
        tokens = [draw.choice((1, 6, 7)) for _ in parents]
        level, told = level_of(parents), torch.tensor([tokens, tokens])
        tree = build_tree(torch.tensor([parents, parents]), level.depth)
        starts_B = torch.tensor([False, True])
        phases_BN = thinking_before(starts_B, told, (6, 7), tree)
        for node in range(1, len(parents) + 1):
            chain = torch.tensor([[tokens[one - 1] for one in path_to(parents, node)]] * 2)
            assert torch.equal(
                phases_BN[:, node - 1], thinking_before(starts_B, chain, (6, 7))[:, -1]
            )


def test_rows_of_all_kinds_share_a_tree(loaded: LoadedModel) -> None:
    """Strict rows keep their tokens in a batch with rows of all other kinds."""
    asked, kinds = everything(), (RELAXED, RELAXED_LOG_PROBS, REJECTION)
    expected, _ = answers(loaded, asked, num_drafts=0)
    for i, kind in zip((0, 4, 3), kinds, strict=True):
        asked[i] = replace(asked[i], speculation=Speculation(None, kind, 5, 0.5))
    told, _ = answers(replace(hidden_chain(loaded), think_ids=(3, 4)), asked)
    assert [told[i] for i in (1, 2, 5)] == [expected[i] for i in (1, 2, 5)]
    assert all(len(one) == 50 for one in (told[0], told[3], told[4]))


@pytest.mark.parametrize("parents", [(0,), (0, 1, 2), (0, 0, 1), (0, 0, 1, 2, 2, 3)])
def test_a_step_tells_what_every_level_below_it_would_have_brought(parents: Parents) -> None:
    levels = [level_of(parents[:num]) for num in range(len(parents) + 1)]
    transitions = DepthTransitions.from_shapes((*levels,))
    for node in range(len(parents) + 1):
        path = path_to(parents, node)
        tried, accepted = transitions.count(len(parents), [(9, path)])
        for level, by_shape in zip(levels, transitions.by_shape, strict=True):
            length = sum(one <= level.num_nodes for one in path)
            for depth, rung in enumerate(by_shape):
                assert tried[rung] == (depth <= length) and accepted[rung] == (depth < length)


def test_chains_share_their_rungs_and_trees_what_they_have_in_common() -> None:
    assert DepthTransitions.from_shapes(chain_shapes(3)).by_shape == ((), (0,), (0, 1), (0, 1, 2))
    grown = DepthTransitions.from_shapes(
        (DraftShape(0, 0, ()), level_of((0,)), level_of((0, 1, 0)), level_of((0, 1, 0, 2)))
    )
    assert grown.by_shape == ((), (0,), (1, 2), (1, 2, 3))
    any_shape = DepthTransitions.from_shapes(
        (DraftShape(0, 0, ()), DraftShape(2, 2, None), DraftShape(4, 2, None))
    )
    assert any_shape.by_shape == ((), (0, 1), (2, 3))


def test_levels_that_requests_may_use() -> None:
    levels = (
        DraftShape(0, 0, ()),
        DraftShape(2, 2, None),
        DraftShape(8, 3, None),
        DraftShape(16, 3, None),
    )
    assert [max_usable_shape(levels, depth) for depth in range(5)] == [0, 1, 1, 3, 3]
    assert [max_usable_shape(chain_shapes(3), depth) for depth in range(5)] == [0, 1, 2, 3, 3]
    assert num_slots_ahead(chain_shapes(3)) == 8 and num_slots_ahead(levels) == 21


def test_paths() -> None:
    """On random trees and tokens, the result equals a walk down from the root."""
    draw = random.Random(8)
    for parents in random_shapes(30, 12):
        tokens = [draw.randrange(3) for _ in parents]
        targets = [draw.randrange(3) for _ in range(len(parents) + 1)]
        best: Sequence[int] = []
        for node in range(len(parents) + 1):
            path = path_to(parents, node)
            before = [0, *path][: len(path)]
            fits = [tokens[n - 1] == targets[b] for n, b in zip(path, before, strict=True)]
            if all(fits) and len(path) > len(best):
                best = path
        told = verdict_of(parents, tokens, targets)
        assert told == [targets[node] for node in (0, *best)]


def verdict_of(parents: Parents, tokens: list[int], targets: list[int]) -> list[int]:
    """Return the tokens that a strict row emits. Siblings with the same token may have different
    targets here, unlike in a model."""
    level = level_of(parents)
    limit_B = torch.tensor([99])
    nothing = torch.zeros(1, len(targets), 3)
    known = VerifyInput(
        drafts_BN=torch.tensor([tokens]),
        q_BNV=None,
        adjusted_BN1V=nothing,
        targets_BN1=torch.tensor([targets]),
        sampling=sampling_rows(SamplingParams(), torch.zeros_like(limit_B)),
        acceptance=AcceptanceRows(limit_B * 0, limit_B, torch.ones(1, 2)),
        num_output_B=limit_B,
        thinking_B=limit_B > 0,
        think_ids=None,
        tree=build_tree(torch.tensor([parents]), level.depth),
    )
    result = paths.deepest_path(known, paths.is_target(known))
    return result.tokens_BE[0, : int(result.num_accepted_B) + 1].tolist()
