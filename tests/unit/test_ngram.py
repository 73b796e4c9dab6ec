"""n-gram drafts equal those of other implementations, and answers equal those without drafts."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from benchmarks.harness.engines import load
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL
from tandem.core.request import Request
from tandem.model.drafters.ngram import NgramDrafter, find_continuation
from tandem.model.loaded import LoadedModel
from tests.kernels import ours
from tests.unit.test_trees import answers, everything

TABLE = Path(__file__).parents[1] / "data" / "ngram_pool.json"


def chain_drafts(text: list[int], size: int, num: int, *, oldest: bool) -> list[int]:
    """Return the drafts of torch and C++, which must agree. The row is in a batch with rows of
    other lengths, and garbage follows its text."""
    other = [0] * (len(text) + 7)
    text_RT = torch.tensor([other, other, text + text[:7] + [0] * (7 - len(text[:7]))])
    of = text_RT, torch.tensor([2, 0]), torch.tensor([len(text), 3]), size, num
    found = []
    for way in (find_continuation, ours().ngram_lookup):
        tokens_BN, num_B = way(*of, oldest=oldest)
        found.append([row[:n] for row, n in zip(tokens_BN.tolist(), num_B.tolist(), strict=True)])
    assert found[0] == found[1]
    return found[0][0]


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    """Load the native operators."""
    load(TINY_MODEL, "speculation.drafter=ngram", "model.kernels=native")


def texts(num: int, seed: int) -> list[tuple[list[int], int, int]]:
    """Return texts over small alphabets, each with an n-gram size and a number of drafts."""
    draw = random.Random(seed)
    found = []
    for _ in range(num):
        vocab_size = draw.choice((2, 3, 5, 9))
        text = [draw.randrange(vocab_size) for _ in range(draw.randint(1, 60))]
        found.append((text, draw.randint(1, 4), draw.randint(1, 6)))
    return found


def test_the_oldest_place_is_that_of_prompt_lookup() -> None:
    for text, size, num in texts(1000, seed=1):
        theirs = PromptLookupCandidateGenerator(None, num, size, max_length=1000)
        ids, _ = theirs.get_candidates(torch.tensor([text]))
        assert chain_drafts(text, size, num, oldest=True) == ids[0, len(text) :].tolist()


def test_the_newest_place_is_the_last_one_of_the_longest_n_gram_with_a_whole_rest() -> None:
    for text, size, num in texts(1000, seed=2):
        expected: list[int] = []
        for length in range(size, 0, -1):
            ends = [
                i
                for i in range(length, len(text))
                if text[i - length : i] == text[len(text) - length :]
            ]
            if ends:
                whole = [i for i in ends if i + num <= len(text)]
                at = max(whole or ends)
                expected = text[at : at + num]
                break
        assert chain_drafts(text, size, num, oldest=False) == expected


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(TINY_MODEL, "speculation.drafter=ngram")


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    """Requests with all sampling options, over texts with repetitions."""
    return everything(held_out(6, 100, 140, seed=3))


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_those_without_drafts(
    loaded: LoadedModel, asked: list[Request], overlap: bool
) -> None:
    expected, _ = answers(loaded, asked, num_drafts=0)
    told, bench = answers(loaded, asked, overlap=overlap, num_drafts=4)
    assert told == expected
    counts = [one.counts for one in bench.updates() if one.counts is not None]
    assert sum(one.num_accepted for one in counts) > 20


def test_a_row_that_goes_on_elsewhere_drafts_as_before(
    loaded: LoadedModel, asked: list[Request]
) -> None:
    """The drafter's table follows from prompt and answer, so that all later steps are the same."""
    [whole], bench = answers(loaded, asked[:1])
    steps = [len(frame.updates[0].token_ids) for frame in bench.frames]
    assert max(steps) > 2
    num_steps = len(steps) // 2
    half = [whole[0], *(token for token, _ in whole[1 : 1 + sum(steps[:num_steps])])]
    resumed = replace(asked[0], output_ids=tuple(half[:-1]))
    [rest], bench = answers(loaded, [resumed])
    assert rest == [half[-1], *whole[len(half) :]]
    assert [len(frame.updates[0].token_ids) for frame in bench.frames] == steps[num_steps:]


def test_the_prompt_is_in_the_memory(loaded: LoadedModel, asked: list[Request]) -> None:
    """Without the prompt fewer drafts are right."""

    class Forgetful(NgramDrafter):
        def register_row(self, table: torch.Tensor, row: int, token_ids: object) -> None:
            return

    accepted = []
    for drafter in (loaded.drafter, Forgetful(3, oldest=False)):
        _, bench = answers(replace(loaded, drafter=drafter), asked[:1])
        [counts] = [one.counts for one in bench.updates() if one.counts is not None]
        accepted.append(counts.num_accepted)
    assert accepted[1] < accepted[0]


def test_a_table_of_another_pool() -> None:
    """Compare with TensorRT-LLM's pool on whole texts, with its option to use the oldest match. Its
    newest match may leave only a short continuation at the end of the text."""
    table = json.loads(TABLE.read_text())
    assert len(table["cases"]) == 400
    for text, size, num, drafts in table["cases"]:
        assert chain_drafts(text, size, num, oldest=True) == drafts
