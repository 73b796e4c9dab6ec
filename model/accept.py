"""Drafts to verdict: pure functions of tensors.

Shape legend: B rows, N drafts of this step.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """``tokens_BN1[b, : num_accepted_B[b] + 1]`` are the tokens row b emits this step."""

    tokens_BN1: Tensor
    num_accepted_B: Tensor


def accept_chain(drafts_BN: Tensor, targets_BN1: Tensor, limit_B: Tensor) -> Verdict:
    """Longest prefix of drafts equal to the main model's own choices, plus one of its own.

    ``targets_BN1[:, i]`` is what the main model chose given drafts < i; ``limit_B`` bounds
    how many drafts a row may use. Lossless: the emitted tokens are all targets.
    """
    matches_BN = (drafts_BN == targets_BN1[:, :-1]).long()
    num_accepted_B = matches_BN.cumprod(1).sum(1)
    return Verdict(targets_BN1, num_accepted_B.minimum(limit_B))
