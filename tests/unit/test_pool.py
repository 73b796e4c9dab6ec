"""The n-gram table that a rank's requests share, compared with a dictionary."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness.engines import Bench, greedy, load
from tandem.model.drafters.base import Emitted
from tandem.model.drafters.ngram import SharedNgramDrafter
from tandem.model.drafters.ngram_table import NUM_SLOTS, NgramTable, hash_ngrams, lookup_drafts
from tests.small import write_small

MOST = 3


def told(
    drafter: SharedNgramDrafter, table: tuple[Tensor, NgramTable], row: int, text: list[int]
) -> None:
    """Feed a text in steps that emit up to three tokens; rejected tokens of a step are noise."""
    drafter.register_row(table, row, text[:5])
    draw, at = random.Random(len(text)), 5
    while at < len(text):
        num = min(draw.randint(1, 3), len(text) - at)
        noise = [draw.randrange(50, 90) for _ in range(3 - num)]
        tokens = torch.tensor([text[at : at + num] + noise])
        at += num
        step = Emitted(tokens, torch.tensor([num]), torch.zeros(1, 3, 0))
        drafter.update_table(table, torch.tensor([row]), torch.tensor([at]), step)


@pytest.mark.parametrize("oldest", [False, True])
def test_drafts_are_what_a_dictionary_has(oldest: bool) -> None:
    """Texts use the same few rows one after another. Each draft follows the longest known
    n-gram."""
    draw, drafter = random.Random(7), SharedNgramDrafter(MOST, oldest=oldest)
    table = drafter.create_table(4, 64, torch.device("cpu"))
    known: dict[tuple[int, ...], list[int]] = {}
    for i in range(40):
        text = [draw.randrange(12) for _ in range(draw.randint(8, 40))]
        told(drafter, table, i % 4, text)
        for at in range(1, len(text)):
            for size in range(1, min(MOST, at) + 1):
                known.setdefault((*text[at - size : at],), []).append(text[at])
    num_found = 0
    for _ in range(200):
        text = [draw.randrange(13) for _ in range(draw.randint(1, 6))]
        last = torch.tensor([([0] * MOST + text)[-MOST:]])
        tokens, num = lookup_drafts(table[1], last, torch.tensor([len(text)]), 4)
        for token in tokens[0, : int(num)].tolist():
            sizes = [n for n in range(MOST, 0, -1) if len(text) >= n and (*text[-n:],) in known]
            followers = known[(*text[-sizes[0] :],)]
            if len({*followers}) == 1 or oldest:
                assert token in followers
            else:
                assert token in followers[1:]
            text.append(token)
            num_found += 1
        assert num == 4 or not any(
            (*text[-n:],) in known for n in range(1, min(MOST, len(text)) + 1)
        )
    assert num_found > 500


def test_an_n_gram_in_anothers_place_is_not_there() -> None:
    """A match compares the whole hash, not only the slot."""
    pool = NgramTable.empty(torch.device("cpu"))
    last = torch.tensor([[3, 4, 5]])
    [[found]] = hash_ngrams(last.unsqueeze(1)).tolist()
    slots = [one % NUM_SLOTS for one in found]
    pool.hash_S[slots] = torch.tensor(found) + NUM_SLOTS
    pool.token_S[slots] = 7
    assert lookup_drafts(pool, last, torch.tensor([3]), 2)[1].tolist() == [0]
    pool.hash_S[slots] = torch.tensor(found)
    tokens, num = lookup_drafts(pool, last, torch.tensor([3]), 1)
    assert (tokens.tolist(), num.tolist()) == ([[7]], [1])
    assert len({*found}) == MOST


def test_another_request_drafts_from_a_text_that_is_gone(tmp_path: Path) -> None:
    """On a repeated prompt, the first steps draft the first answer before it repeats itself. A
    private table cannot do this. Both answers are equal."""
    write_small(tmp_path)
    nums = []
    for sets in (("speculation.is_public_pool=true",), ()):
        loaded = load(tmp_path, "speculation.drafter=ngram", "model.kernels=native", *sets)
        bench = Bench(loaded, num_drafts=3)
        ids = list(range(40, 60))
        answers = [bench.generate(greedy("a", ids, 40, ignore_eos=True)) for _ in range(1)]
        answers.append(bench.generate(greedy("b", ids, 40, ignore_eos=True)))
        assert answers[0] == answers[1]
        counts = bench.updates()[-1].counts
        assert counts is not None
        nums.append(counts.num_accepted)
    assert nums[0] >= 25 > nums[1]
