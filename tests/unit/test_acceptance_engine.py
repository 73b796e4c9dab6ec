"""Kinds of acceptance through the whole decode engine and the real drafter."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, load
from tandem.core.request import (
    REJECTION,
    REJECTION_GREEDY,
    RELAXED,
    RELAXED_LOG_PROBS,
    TYPICAL,
    Request,
    SamplingParams,
    Speculation,
)
from tandem.model.loaded import LoadedModel
from tests.numerics import assert_near, network_rounding
from tests.unit.test_sampling import check_chi_square

THINK = (3, 4)
PROMPT = (11, 45, 3, 77, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("acceptance")
    tiny.write_tiny(path, seed=31)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return replace(load(folder), think_ids=THINK)


def ask(name: str, prompt: tuple[int, ...], max_tokens: int, **how: object) -> Request:
    speculation = Speculation(**how)  # type: ignore[arg-type]
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, sampling=sampling, speculation=speculation)


def exact_shares(folder: Path, top_k: int, length: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every answer of ``length`` tokens, from transformers' logits."""
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, share in shares.items():
            logits = tiny.reference_logits(folder, [*PROMPT, *tokens])[-1]
            top = logits.topk(top_k)
            for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
                longer[(*tokens, token)] = share * p
        shares = longer
    return shares


@pytest.mark.parametrize("kind", [REJECTION, REJECTION_GREEDY])
def test_rejection_draws_from_the_models_own_distribution(
    folder: Path, loaded: LoadedModel, kind: str
) -> None:
    num_answers, length, top_k = 900, 4, 2
    answers: list[tuple[int, ...]] = []
    bench = Bench(loaded, num_drafts=2, max_rows=150, page_size=16, num_pages=800)
    for start in range(0, num_answers, 150):
        requests = []
        for i in range(start, start + 150):
            request = ask(f"r{i}", PROMPT, length, acceptance=kind)
            sampling = replace(request.sampling, temperature=1.0, top_k=top_k, seed=i)
            requests.append(replace(request, sampling=sampling))
        answers += [tuple(tokens) for tokens, _ in bench.generate(*requests)]
    bench.check_empty()
    shares = exact_shares(folder, top_k, length)
    assert len(shares) == top_k**length and set(answers) <= set(shares)
    check_chi_square([answers.count(answer) for answer in shares], list(shares.values()))


def test_answers_over_trees_have_the_models_own_distribution(folder: Path) -> None:
    """Strict acceptance keeps the distribution although drafts are sampled with the same noise as
    tokens."""
    loaded = load(folder, "speculation.max_tree_nodes=6", "speculation.max_depth=2")
    num_answers, length, top_k = 900, 4, 2
    told: list[tuple[int, ...]] = []
    bench = Bench(loaded, num_drafts=2, max_rows=150, page_size=16, num_pages=1000)
    for start in range(0, num_answers, 150):
        asked = [ask(f"r{i}", PROMPT, length) for i in range(start, start + 150)]
        hot = [replace(one.sampling, temperature=1.0, top_k=top_k) for one in asked]
        requests = [
            replace(one, sampling=replace(sampling, seed=start + i))
            for i, (one, sampling) in enumerate(zip(asked, hot, strict=True))
        ]
        told += [tuple(tokens) for tokens in answers(bench, requests)]
    shares = exact_shares(folder, top_k, length)
    assert set(told) <= set(shares)
    check_chi_square([told.count(answer) for answer in shares], list(shares.values()))


def answers(bench: Bench, requests: list[Request]) -> list[list[int]]:
    result = [tokens for tokens, _ in bench.generate(*requests)]
    bench.check_empty()
    return result


def accepted(bench: Bench) -> int:
    return sum(u.counts.num_accepted for u in bench.updates() if u.counts is not None)


def test_mixed_kinds_in_one_batch_leave_strict_rows_alone(loaded: LoadedModel) -> None:
    kinds = ("strict", RELAXED, RELAXED_LOG_PROBS, REJECTION, REJECTION_GREEDY, TYPICAL)
    prompts = [(7 + i, 3, 50, 60 - i) for i in range(6)]
    plain = answers(Bench(loaded, max_rows=6), [ask(f"r{i}", p, 30) for i, p in enumerate(prompts)])
    mixed_up = itertools.permutations(zip(prompts, kinds, strict=True))
    for number, rows in enumerate(itertools.islice(mixed_up, 0, 720, 240)):
        requests = []
        for i, (prompt, kind) in enumerate(rows):
            loose = {"relaxed_top_n": 9, "relaxed_delta": 0.9} if kind.startswith("rel") else {}
            request = ask(f"r{number}{i}", prompt, 30, acceptance=kind, **loose)
            if kind.startswith("rej") or kind == TYPICAL:
                hot = replace(request.sampling, temperature=0.8, seed=number)
                request = replace(request, sampling=hot)
            requests.append(request)
        given = answers(Bench(loaded, max_rows=6), requests)
        for (prompt, kind), tokens in zip(rows, given, strict=True):
            if kind == "strict":
                assert tokens == plain[prompts.index(prompt)]


def test_greedy_rejection_and_tight_relaxed_are_strict(loaded: LoadedModel) -> None:
    [strict] = answers(Bench(loaded), [ask("r", PROMPT, 40)])
    for kind in (REJECTION, REJECTION_GREEDY, RELAXED, RELAXED_LOG_PROBS):
        assert answers(Bench(loaded), [ask("r", PROMPT, 40, acceptance=kind)]) == [strict]


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [((13, 3, 45), True), ((13, 3, 4, 45), False), ((13, 45), False), ((4, 12, 3), True)],
)
def test_relaxed_accepts_more_while_the_model_thinks(
    loaded: LoadedModel, prompt: tuple[int, ...], thinks: bool
) -> None:
    """The last marker of the prompt decides the phase at the start; the answer itself may end
    it."""
    strict_bench, relaxed_bench = Bench(loaded), Bench(loaded)
    [strict] = answers(strict_bench, [ask("r", prompt, 60)])
    loose = {"acceptance": RELAXED, "relaxed_top_n": 96, "relaxed_delta": 1.0}
    [relaxed] = answers(relaxed_bench, [ask("r", prompt, 60, **loose)])
    if not thinks and THINK[0] not in strict:
        assert relaxed == strict
        return
    assert thinks == (relaxed != strict)
    until_end = relaxed.index(THINK[1]) if THINK[1] in relaxed else len(relaxed)
    assert until_end > 8, "this prompt was to think for a while"
    assert accepted(relaxed_bench) > accepted(strict_bench)


def test_log_probabilities_are_of_the_tokens_that_were_told(
    folder: Path, loaded: LoadedModel
) -> None:
    request = ask("r", (11, 3, 45), 30, acceptance=RELAXED, relaxed_top_n=96, relaxed_delta=1.0)
    request = replace(request, sampling=replace(request.sampling, logprobs=0))
    bench = Bench(loaded)
    [tokens] = answers(bench, [request])
    told = [entry.logprob for update in bench.updates() for entry in update.logprobs]
    logits = tiny.reference_logits(folder, [11, 3, 45, *tokens[:-1]])[3:]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    num_layers, size = loaded.config.num_hidden_layers, float(logits.abs().max())
    assert_near(torch.tensor(told), expected, network_rounding(num_layers, 48, size, growth=4))
