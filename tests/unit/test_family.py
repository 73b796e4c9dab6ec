"""Models of the family other than V3 give the same tokens as transformers."""

from pathlib import Path

import pytest

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load

V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 4.0,
    "num_nextn_predict_layers": 0,
}
VARIANTS: dict[str, dict[str, object]] = {
    "moonlight": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "num_nextn_predict_layers": 0,
        "n_shared_experts": 2,
    },
    "kimi_k2": {
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_theta": 50000.0,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "v2_lite": V2,
    "v2": V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "v2_two_groups": V2 | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_family_members_match_transformers(tmp_path: Path, name: str) -> None:
    tiny.write_tiny(tmp_path, seed=8, num_mtp_layers=0, **VARIANTS[name])
    ids = [5, 17, 33, 80, 41, 22, 9]
    expected = tiny.reference_greedy(tmp_path, ids, 16)
    if name == "kimi_k2":
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    bench = Bench(load(tmp_path))
    assert bench.loaded.config.model_type == str(VARIANTS[name].get("model_type", name)).replace(
        "moonlight", "deepseek_v3"
    )
    [(tokens, _)] = bench.generate(greedy("r", ids, 16, ignore_eos=True))
    assert tokens == expected
    bench.check_empty()
