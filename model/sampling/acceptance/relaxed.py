"""Relaxed acceptance: in the thinking part, a likely draft passes even if it is not the best token.

Lossy, for greedy requests. The rule is that of TensorRT-LLM: the draft is among the top N tokens,
and at most delta less likely than the best. Likelihood is the probability, as in TensorRT-LLM's
kernel, or the log probability, as in its documentation. Unlike in TensorRT-LLM, the rule applies to
each draft by its own position: after the end of the thinking part, the drafts of a chain must pass
the strict rule.
Shape legend: B rows, N drafts of this step, N1 = N + 1 positions, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.model.sampling.acceptance import paths
from tandem.model.sampling.acceptance.base import VerifyInput, VerifyResult
from tandem.model.sampling.acceptance.strict import STRICT
from tandem.model.sampling.thinking import thinking_before


def accept_drafts(score: Callable[[Tensor], Tensor], verify_input: VerifyInput) -> VerifyResult:
    """Emit the accepted drafts unchanged, then one token that the main model chose.

    This token replaces the first rejected draft, or follows the last draft. ``score`` maps log p(x)
    to the scale of delta: a draft's score must reach that of the best token minus delta.
    """
    thinking_BN = thinking_before(
        thinking_B=verify_input.thinking_B,
        drafts_BN=verify_input.drafts_BN,
        think_ids=verify_input.think_ids,
        tree=verify_input.tree,
    )
    log_p_BN, is_likely_BN = _likely(score, verify_input)
    passes_BN = paths.is_target(verify_input) | (thinking_BN & is_likely_BN)
    return paths.emit_accepted(verify_input, passes_BN, log_p_BN)


def _likely(score: Callable[[Tensor], Tensor], verify_input: VerifyInput) -> tuple[Tensor, Tensor]:
    """Return log p of each draft [B, N], and whether it is in the top N and within delta of the
    best.

    Among equally likely tokens the lower id ranks first, as in argmax. A token of probability 0
    never passes.
    """
    drafts_BN1 = verify_input.drafts_BN.unsqueeze(2)
    logits_BNV = paths.before_drafts(verify_input)
    draft_BN1 = logits_BNV.gather(2, drafts_BN1)
    id_V = torch.arange(logits_BNV.shape[2], device=logits_BNV.device)
    ahead_BNV = (logits_BNV > draft_BN1) | ((logits_BNV == draft_BN1) & (id_V < drafts_BN1))
    top_n_B1, delta_B1 = verify_input.acceptance.bounds_B2.split(1, 1)
    is_top_BN = ahead_BNV.sum(2) < top_n_B1
    total_BN = logits_BNV.logsumexp(2)
    log_p_BN = draft_BN1.squeeze(2) - total_BN
    log_p_max_BN = logits_BNV.amax(2) - total_BN
    bound_BN = score(log_p_max_BN) - delta_B1
    return log_p_BN, is_top_BN & (score(log_p_BN) >= bound_BN) & (log_p_BN.exp() > 0)


RELAXED = replace(STRICT, accept_drafts=partial(accept_drafts, torch.exp))
RELAXED_LOG_PROBS = replace(STRICT, accept_drafts=partial(accept_drafts, lambda log_p: log_p))
