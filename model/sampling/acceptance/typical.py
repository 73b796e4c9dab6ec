"""Typical acceptance (Medusa, arXiv 2401.10774): a likely draft passes where the entropy is high.

Lossy, for sampled requests. Draft x passes if p(x) > min(epsilon, alpha * exp(-H)). Here p is the
distribution that the request samples from after the drafts before x, and H is its entropy. The
token that the main model samples passes too, because accepting it never adds loss.
Shape legend: B rows, N drafts of this step, V vocabulary.
"""

from dataclasses import replace

from torch import Tensor

from tandem.model.sampling.acceptance import paths, strict
from tandem.model.sampling.acceptance.base import VerifyInput, VerifyResult

_TINY = 1e-5
"""Added to p before its logarithm in the entropy, as in the authors' code."""


def accept_drafts(verify_input: VerifyInput) -> VerifyResult:
    """Accept typical drafts and emit one token of the main model after them. Batches in which all
    rows are greedy use strict acceptance."""
    if verify_input.sampling.all_greedy or not verify_input.drafts_BN.shape[1]:
        return strict.accept_drafts(verify_input)
    rows = verify_input.sampling
    p_BNV = rows.sampler.filtered_log_probs(paths.before_drafts(verify_input), rows).exp()
    p_BN = p_BNV.gather(2, verify_input.drafts_BN.unsqueeze(2)).squeeze(2)
    passes_BN = paths.is_target(verify_input) | (
        p_BN > threshold(p_BNV, verify_input.acceptance.bounds_B2)
    )
    return paths.emit_accepted(verify_input, passes_BN, p_BN.log())


def threshold(p_BNV: Tensor, bounds_B2: Tensor) -> Tensor:
    """Return the probability [B, N] that a draft's p must exceed."""
    entropy_BN = -(p_BNV * (p_BNV + _TINY).log()).sum(2)
    epsilon_B1, alpha_B1 = bounds_B2.split(1, 1)
    return epsilon_B1.minimum(alpha_B1 * (-entropy_BN).exp())


TYPICAL = replace(
    strict.STRICT, accept_drafts=accept_drafts, bounds=("typical_epsilon", "typical_alpha")
)
