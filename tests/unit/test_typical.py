"""Typical acceptance compared with its formula in plain Python, over chains and trees."""

import math
import random
from dataclasses import replace

import pytest
import torch

from tandem.core.request import TYPICAL, SamplingParams
from tandem.model.network.tree import build_tree
from tandem.model.sampling.acceptance.typical import threshold
from tests.markov import judged_by, verify_input
from tests.trees import Parents, level_of, path_to
from tests.unit.test_acceptance import verdict_of
from tests.unit.test_sampling import sampling_rows

VOCAB = 12


def probabilities(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(one / temperature) for one in logits]
    return [one / sum(weights) for one in weights]


def is_typical(p: list[float], token: int, epsilon: float, alpha: float) -> bool:
    entropy = -sum(one * math.log(one + 1e-5) for one in p)
    return p[token] > min(epsilon, alpha * math.exp(-entropy))


def best_path(
    parents: Parents, passes: list[bool], log_p: list[float], limit: int
) -> tuple[int, ...]:
    """Return the longest path whose drafts all pass. The most likely one wins ties, then the
    first."""
    whole = [(0, 0.0, ())]
    for node in range(1, len(parents) + 1):
        path = path_to(parents, node)
        if len(path) <= limit and all(passes[one - 1] for one in path):
            whole.append((len(path), sum(log_p[one - 1] for one in path), (*path,)))
    return max(whole, key=lambda one: one[:2])[2]


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_draft_passes_by_the_formula(is_tree: bool) -> None:
    draw, seen = random.Random(3), set()
    for case in range(300):
        num = draw.randint(1, 7)
        parents = tuple(draw.randint(0, i) if is_tree else i for i in range(num))
        tokens = [draw.randrange(VOCAB) for _ in range(num)]
        logits = [[draw.gauss(0, 2) for _ in range(VOCAB)] for _ in range(num + 1)]
        temperature, epsilon = draw.choice((0.5, 0.9, 1.4)), draw.choice((0.05, 0.09, 0.3))
        alpha, limit = draw.choice((0.2, 0.3, 0.6)), draw.randint(0, 4)
        rows = sampling_rows(SamplingParams(temperature, seed=case), torch.tensor([case]))
        known = verify_input(
            torch.tensor([tokens]),
            torch.tensor([logits]),
            rows,
            num_output_B=torch.tensor([3]),
            limit_B=torch.tensor([limit]),
        )
        if is_tree:
            tree = build_tree(torch.tensor([parents]), level_of(parents).depth)
            known = replace(known, tree=tree)
        known = judged_by(known, bounds_B2=torch.tensor([[epsilon, alpha]]))
        targets = known.targets_BN1[0].tolist()
        of_parents = [probabilities(logits[parent], temperature) for parent in parents]
        passes = [
            token == targets[parent] or is_typical(p, token, epsilon, alpha)
            for token, parent, p in zip(tokens, parents, of_parents, strict=True)
        ]
        log_p = [math.log(p[token]) for p, token in zip(of_parents, tokens, strict=True)]
        path = best_path(parents, passes, log_p, limit)
        result = verdict_of(TYPICAL, known)
        told = result.tokens_BE[0, : int(result.num_accepted_B) + 1].tolist()
        assert told == [*(tokens[node - 1] for node in path), targets[path[-1] if path else 0]]
        seen.add(len(path))
    assert seen >= {0, 1, 2, 3}


def test_the_threshold_follows_how_open_the_choice_is() -> None:
    sure, open_ = [1.0, 0.0, 0.0, 0.0], [0.25] * 4
    bounds = torch.tensor([[0.09, 0.3]])
    assert threshold(torch.tensor([[sure]]), bounds).item() == pytest.approx(0.09)
    expected = 0.3 * math.exp(sum(0.25 * math.log(0.25 + 1e-5) for _ in range(4)))
    assert threshold(torch.tensor([[open_]]), bounds).item() == pytest.approx(expected)
    assert expected < 0.09


def test_what_the_filters_leave_out_does_not_pass() -> None:
    """A draft that the filters exclude does not pass, whatever its probability before them."""
    rows = sampling_rows(SamplingParams(1.0, top_k=1), torch.tensor([1]))
    known = verify_input(
        torch.tensor([[1]]),
        torch.tensor([[[1.0, 0.9, -9.0], [0.0, 1.0, 0.0]]]),
        rows,
        num_output_B=torch.tensor([1]),
        limit_B=torch.tensor([1]),
    )
    known = judged_by(known, bounds_B2=torch.tensor([[0.09, 0.3]]))
    assert verdict_of(TYPICAL, known).num_accepted_B.tolist() == [0]
