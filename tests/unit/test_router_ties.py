"""Equal routing scores: the lowest expert ids and groups win, in every method.

The rule is stated in docs/concepts/model.md, Mixture of experts.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import tiny
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import TORCH_KERNELS, Kernels
from tandem.model.network.moe import Gate
from tests.kernels import ours

NUM_EXPERTS, NUM_GROUPS, NUM_KEPT, NUM_CHOSEN, NUM_TOKENS, NUM_SCORES = 24, 6, 3, 5, 40, 3


def best(scores: dict[int, float], num: int) -> list[int]:
    """Sort by falling score, equal scores by rising id, and return the first ``num`` ids."""
    return sorted(scores, key=lambda one: (-scores[one], one))[:num]


def expected(method: str, scores: list[float], bias: list[float]) -> list[int]:
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    candidates = dict(enumerate(biased))
    if method != "greedy":
        size = NUM_EXPERTS // NUM_GROUPS
        num_counted = 2 if method == "noaux_tc" else 1
        groups = {
            g: sum(sorted(biased[g * size : (g + 1) * size])[-num_counted:])
            for g in range(NUM_GROUPS)
        }
        kept = best(groups, NUM_KEPT)
        candidates = {e: score for e, score in candidates.items() if e // size in kept}
    return best(candidates, NUM_CHOSEN)


@pytest.mark.parametrize("kernels", [TORCH_KERNELS, ours()], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("method", ["noaux_tc", "greedy", "group_limited_greedy"])
def test_the_lowest_ids_win_among_equals(method: str, kernels: Kernels, tmp_path: Path) -> None:
    shape: dict[str, object] = {
        "n_routed_experts": NUM_EXPERTS,
        "n_group": NUM_GROUPS,
        "topk_group": NUM_KEPT,
        "num_experts_per_tok": NUM_CHOSEN,
        "hidden_size": NUM_TOKENS,
        "topk_method": method,
    }
    if method != "noaux_tc":
        shape |= {"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": False}
    (tmp_path / "config.json").write_text(json.dumps(tiny.BASE | shape))
    config = ModelConfig.from_dir(tmp_path)
    generator = torch.Generator().manual_seed(7)
    gate = Gate(config)
    scores_ET = torch.randint(0, NUM_SCORES, (NUM_EXPERTS, NUM_TOKENS), generator=generator)
    gate.weight.data = scores_ET.float()
    bias_E = torch.zeros(NUM_EXPERTS)
    if method == "noaux_tc":
        bias_E = torch.randint(0, 2, (NUM_EXPERTS,), generator=generator) * 0.125
        gate.e_score_correction_bias.copy_(bias_E)
    gate.process_weights_after_loading(kernels)
    x_TD = torch.eye(NUM_TOKENS)
    logits_TE = scores_ET.T.float()
    sigmoid = config.scoring_func == "sigmoid"
    scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
    ids_TK, _ = gate(x_TD)
    for token in range(NUM_TOKENS):
        wanted = expected(method, scores_TE[token].tolist(), bias_E.tolist())
        assert ids_TK[token].tolist() == wanted, f"token {token}: {scores_ET[:, token].tolist()}"
