"""Bias, penalties and min_tokens through both engines equal the reference's, whatever was
drafted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, load
from benchmarks.harness.exact import MARGIN
from tandem.core.request import Request, SamplingParams, Speculation, TokenBias
from tandem.model.loaded import LoadedModel
from tests.numerics import assert_near, network_rounding
from tests.unit.test_drafts import Scripted
from tests.unit.test_sampling import EOS, obvious

EVERYTHING = (
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(frequency_penalty=-0.3, logit_bias=(TokenBias(40, 3.0), TokenBias(7, -100.0))),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-0.5, min_tokens=9),
    SamplingParams(),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling")
    tiny.write_tiny(folder, seed=24)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder)


def prompt_of(i: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 + i)
    return torch.randint(5, 90, (6 + 3 * i,), generator=generator).tolist()


def request_of(i: int, num_drafts: int, max_tokens: int, **changes: object) -> Request:
    sampling = replace(EVERYTHING[i], max_tokens=max_tokens, **{"seed": 7, **changes})  # type: ignore[arg-type]
    name = f"{i} {num_drafts}"
    return Request(name, tuple(prompt_of(i)), (), sampling, Speculation(num_drafts))


def test_greedy_with_penalties_is_the_reference_for_every_number_of_drafts(
    loaded: LoadedModel, folder: Path
) -> None:
    """All kinds of rules with n = 0..3 drafts in one batch, teacher-forced place by place."""
    bench = Bench(loaded, max_rows=20, num_pages=400)
    asked = [request_of(i, n, 30, ignore_eos=i != 3) for i in range(5) for n in range(4)]
    num_plain_differs = 0
    for request, (tokens, _) in zip(asked, bench.generate(*asked), strict=True):
        prompt, sampling = list(request.prompt_ids), request.sampling
        logits = tiny.reference_logits(folder, prompt + tokens[:-1])[len(prompt) - 1 :]
        for place, (token, row) in enumerate(zip(tokens, logits, strict=True)):
            right = obvious(row, prompt, tokens[:place], sampling)
            assert right[token] > right.max() - MARGIN, (request.request_id, place)
            num_plain_differs += int(row.argmax()) != token
    assert num_plain_differs > 100, "the rules must have changed something"
    assert sum(update.counts.num_accepted for update in bench.updates() if update.counts) > 0
    bench.check_empty()


def test_nothing_is_left_of_the_rules_that_a_rows_former_owner_had(loaded: LoadedModel) -> None:
    """A row does not inherit the rules of its previous owner, even if another row of the step has
    rules."""
    bench = Bench(loaded, max_rows=2, num_pages=400)
    plain, ruled = request_of(4, 1, 12, ignore_eos=True), request_of(1, 1, 12, ignore_eos=True)
    [(wanted, _)] = bench.generate(plain)
    forced = SamplingParams(logit_bias=(TokenBias(40, 100.0),), max_tokens=4, seed=7)
    former = [Request(f"former {i}", (9, 8), (), forced, Speculation(1)) for i in range(2)]
    assert [tokens for tokens, _ in bench.generate(*former)] == [[40] * 4] * 2
    answers = bench.generate(replace(plain, request_id="again"), ruled)
    assert answers[0][0] == wanted
    bench.check_empty()


def test_sampled_output_is_the_same_for_every_number_of_drafts_and_every_resume(
    loaded: LoadedModel,
) -> None:
    heat = {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "ignore_eos": True}
    for i in range(len(EVERYTHING)):
        bench = Bench(loaded, max_rows=20, num_pages=400)
        asked = [request_of(i, n, 18, **heat) for n in (0, 1, 3)]
        answers = [tokens for tokens, _ in bench.generate(*asked)]
        assert answers == [answers[0]] * 3
        rests = [
            replace(asked[2], request_id=f"cut {cut}", output_ids=tuple(answers[0][:cut]))
            for cut in range(1, 18)
        ]
        resumed = [tokens for tokens, _ in bench.generate(*rests)]
        assert resumed == [answers[0][cut:] for cut in range(1, 18)]
        other = replace(asked[0], sampling=replace(asked[0].sampling, seed=8))
        assert bench.generate(other)[0][0] != answers[0]
        bench.check_empty()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_tokens", [1, 2, 6])
def test_nothing_ends_before_min_tokens(
    loaded: LoadedModel, temperature: float, min_tokens: int
) -> None:
    """EOS and a stop id are by far the most likely tokens, yet both are suppressed until
    min_tokens."""
    sampling = SamplingParams(
        temperature=temperature,
        seed=3,
        min_tokens=min_tokens,
        max_tokens=20,
        stop_token_ids=(50,),
        logit_bias=(TokenBias(EOS, 60.0), TokenBias(50, 59.0)),
    )
    bench = Bench(loaded)
    asked = [Request(f"r{n}", tuple(prompt_of(1)), (), sampling, Speculation(n)) for n in range(4)]
    answers = bench.generate(*asked)
    assert answers == [answers[0]] * 4
    tokens, reason = answers[0]
    assert (len(tokens), reason) == (min_tokens + 1, "stop")
    assert not {EOS, 50} & set(tokens[:-1])
    bench.check_empty()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_of_raw_logits(loaded: LoadedModel, folder: Path, temperature: float) -> None:
    """Log probabilities do not depend on how the token was chosen or on the number of drafts. The
    first token has them too."""
    bench = Bench(loaded, max_rows=20, num_pages=400)
    asked = [
        request_of(i, n, 14, temperature=temperature, logprobs=(None, 0, 3, 5)[n])
        for i in range(5)
        for n in range(4)
    ]
    answers = bench.generate(*asked)
    for request, (tokens, _) in zip(asked, answers, strict=True):
        [*_, last] = [p for p in bench.progress if p.sequence.request is request]
        told = last.logprobs
        for update in bench.updates():
            if update.identity.request_id == request.request_id:
                told += update.logprobs
        num_top = request.sampling.logprobs
        if num_top is None:
            assert told == ()
            continue
        prompt = list(request.prompt_ids)
        logits = tiny.reference_logits(folder, prompt + tokens[:-1])[len(prompt) - 1 :]
        size = float(logits.abs().max())
        bound = network_rounding(loaded.config.num_hidden_layers, 48, size, growth=16)
        for token, row, got in zip(tokens, logits.log_softmax(-1), told, strict=True):
            assert_near(torch.tensor(got.logprob), row[token], bound)
            assert len(got.top_ids) == num_top
            assert_near(torch.tensor(got.top_logprobs), row.topk(num_top)[0], bound)
            assert_near(row[list(got.top_ids)], row.topk(num_top)[0], bound)
    bench.check_empty()


@pytest.mark.parametrize(
    "settings",
    [{"logit_bias": (TokenBias(40, 100.0),)}, {"temperature": 100.0}],
    ids=["bias", "noise"],
)
def test_drafts_are_picked_by_the_same_rules_and_noise(
    loaded: LoadedModel, settings: dict[str, object]
) -> None:
    """Rules and noise that outweigh the logits make draft and main model choose the same tokens."""
    bench = Bench(loaded)
    request = request_of(4, 3, 60, ignore_eos=True, **settings)
    bench.generate(request)
    counts = bench.updates()[-1].counts
    assert counts is not None and counts.num_accepted > 0.8 * counts.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("pattern", [[3], [1, 3, 0, 2]], ids=str)
def test_penalties_see_the_drafts_before_each_place(
    loaded: LoadedModel, pattern: list[int], temperature: float
) -> None:
    """Acceptance is forced, and runs of accepted drafts equal the tokens of plain decoding.

    The last request would end within a run if ``min_tokens`` were counted from its start.
    """
    late_end = SamplingParams(min_tokens=8, logit_bias=(TokenBias(EOS, 100.0),))
    asked = []
    for i, rules in enumerate((*EVERYTHING, late_end)):
        is_last = rules is late_end
        sampling = replace(
            rules, seed=7, temperature=temperature, max_tokens=30, ignore_eos=not is_last
        )
        asked.append(Request(f"r{i}", tuple(prompt_of(1)), (), sampling))
    plain = Bench(loaded, num_drafts=0, max_rows=len(asked)).generate(*asked)
    for request, (answer, reason) in zip(asked, plain, strict=True):
        assert len(answer) == (9 if request is asked[-1] else 30)
        drafter = Scripted(answer, pattern)
        drafter.num_prompt = len(request.prompt_ids)
        bench = Bench(replace(loaded, drafter=drafter), num_drafts=3)
        assert bench.generate(request) == [(answer, reason)]
        runs = [len(update.token_ids) for update in bench.updates()][:-1]
        assert runs == [pattern[k % len(pattern)] + 1 for k in range(len(runs))]
        bench.check_empty()
