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
        places = zip(scores_BQV.unbind(1), nodes.depth_BQ.unbind(1), strict=True)
        many = [_perturbed(x, sampling, num_output_B + depth_B) for x, depth_B in places]
        scores_BQV = torch.stack(many, 1)
    scores, tokens = scores_BQV.log_softmax(-1).topk(num_ranks)
    return tokens, scores.nan_to_num(nan=NOTHING, neginf=NOTHING).clamp(max=0)


def _perturbed(adjusted_BV: Tensor, sampling: SamplingRows, output_index_B: Tensor) -> Tensor:
    log_p_BV = sampling.sampler.filtered_log_probs(adjusted_BV, sampling)
    noise_BV = gumbel(sampling.seed_B, output_index_B, log_p_BV.shape[1])
    is_sampled_B1 = sampling.temperature_B.unsqueeze(1) > 0
    return torch.where(is_sampled_B1, log_p_BV + noise_BV, adjusted_BV)
