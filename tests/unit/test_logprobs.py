"""Log probabilities of chosen tokens, and the most likely tokens of a vocabulary."""

import pytest
import torch

from tandem.model.sampling.logprobs import raw_logprobs
from tests.numerics import UNIT, assert_near, rounding


@pytest.mark.parametrize("vocab", [50, 64, 512, 2048, 129_280])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_the_likeliest_are_those_that_sorting_finds(vocab: int, num_top: int) -> None:
    torch.manual_seed(vocab + num_top)
    logits_BNV = 3 * torch.randn(3, 2, vocab)
    logits_BNV[0, 0, 7 : 7 + num_top] += 50  # all of them next to each other
    tokens_BN = torch.randint(vocab, (3, 2))
    found = raw_logprobs(logits_BNV, tokens_BN, num_top)
    log_p_BNV = logits_BNV.double().log_softmax(-1)
    top = torch.sort(log_p_BNV, dim=-1, descending=True, stable=True)
    assert torch.equal(found.top_ids_BNK, top.indices[..., :num_top])
    # The logarithm of a sum has the relative error of the sum as its absolute error. Two
    # differences are rounded too: one of the size of the logits and one of the result.
    size_BN1 = log_p_BNV.abs().amax(-1, keepdim=True)
    bound_BN1 = rounding(vocab, 1.0) + 2 * UNIT[torch.float32] * size_BN1
    assert_near(found.top_BNK, top.values[..., :num_top], bound_BN1)
    chosen_BN = log_p_BNV.gather(-1, tokens_BN.unsqueeze(-1)).squeeze(-1)
    assert_near(found.chosen_BN, chosen_BN, bound_BN1.squeeze(-1))
