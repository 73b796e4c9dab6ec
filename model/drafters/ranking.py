"""The likeliest tokens of a drafter's distributions, for trees of drafts.

Shape legend: B rows, Q nodes of each, K ranks, M drafts so far, V vocabulary.
"""

import torch
from torch import Tensor

from model.drafters.base import View
from model.network.tree import Tree
from model.sampling.sampler import SamplingRows, adjusted_places, gumbel

NOTHING = float("-inf")


def rank(
    view: View, logits_BQV: Tensor, drafts_BM: Tensor, nodes: Tree, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """The tokens [B, Q, K] that may follow ``nodes``, the likeliest first, and the logarithm of the
    share that each has. The nodes' bits are of the last known token and ``drafts_BM``.

    Likely is to a sampled row what it would choose of these logits with its noise of that place:
    the first is the draft of a chain, each other that if those before were ruled out.
    """
    sampling, num_output_B = view.sampling, view.num_output_B
    scores_BQV = adjusted_places(logits_BQV, sampling, num_output_B, drafts_BM, nodes)
    if not sampling.all_greedy:
        index_BQ = num_output_B.unsqueeze(1) + nodes.depth_BQ
        scores_BQV = _perturbed(scores_BQV, sampling, index_BQ)
    scores, tokens = scores_BQV.log_softmax(-1).topk(num_ranks)
    return tokens, scores.nan_to_num(nan=NOTHING, neginf=NOTHING).clamp(max=0)


def _perturbed(adjusted_BQV: Tensor, sampling: SamplingRows, output_index_BQ: Tensor) -> Tensor:
    log_p_BQV = sampling.sampler.filtered_log_probs(adjusted_BQV, sampling)
    noise_BQV = gumbel(sampling.seed_B.unsqueeze(1), output_index_BQ, log_p_BQV.shape[2])
    is_sampled_B11 = sampling.temperature_B.view(-1, 1, 1) > 0
    return torch.where(is_sampled_B11, log_p_BQV + noise_BQV, adjusted_BQV)
