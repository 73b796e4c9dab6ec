"""Strict acceptance: a draft passes iff it is the token that the main model itself chose.

Lossless: the emitted tokens are those of decoding without drafts. In sampled rows, a draft is
sampled with the same noise as the token that it predicts. This raises the acceptance rate.
Shape legend: B rows, N drafts of this step, N1 = N + 1 positions, V vocabulary.
"""

from torch import Tensor

from tandem.model.sampling.acceptance import paths
from tandem.model.sampling.acceptance.base import (
    AcceptanceRule,
    SampledDraft,
    VerifyInput,
    VerifyResult,
)
from tandem.model.sampling.ranking import top_by_target_noise
from tandem.model.sampling.sampler import SamplingRows, draw


def accept_drafts(verify_input: VerifyInput) -> VerifyResult:
    """Accept the longest path of drafts that the main model chose too, and emit one more of its
    tokens."""
    passes_BN = paths.is_target(verify_input)
    if verify_input.tree is not None:
        return paths.deepest_path(verify_input, passes_BN)
    num_accepted_B = passes_BN.long().cumprod(1).sum(1).minimum(verify_input.acceptance.limit_B)
    return VerifyResult(verify_input.targets_BN1, num_accepted_B)


def sample_target(
    adjusted_BV: Tensor, sampling: SamplingRows, output_index_B: Tensor
) -> SampledDraft:
    """Return the token that the main model would choose from the same logits at the same
    position."""
    return draw(adjusted_BV, sampling, output_index_B), None


STRICT = AcceptanceRule(sample_target, top_by_target_noise, accept_drafts)
