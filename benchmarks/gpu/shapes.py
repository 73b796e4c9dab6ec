"""Models of published dimensions with random weights, made on the device that uses them."""

from typing import Any

import torch
from torch import Tensor, nn

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.weights import keep_fp8
from tandem.model.drafters.base import Drafter
from tandem.model.drafters.mtp import MtpDrafter, MtpLayer
from tandem.model.drafters.none import NoDrafter
from tandem.model.kernels import create_kernels
from tandem.model.kernels.base import Kernels
from tandem.model.loaded import LoadedModel
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.layers import process_weights_after_loading

YARN = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
YARN |= {"original_max_position_embeddings": 4096}
HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": YARN, "eos_token_id": 1}
COMMON |= {"max_position_embeddings": 163840, "num_nextn_predict_layers": 1} | HEADS

SHAPES: dict[str, dict[str, Any]] = {
    # deepseek-ai/DeepSeek-V2-Lite, config.json; an MTP layer is appended.
    "v2-lite": COMMON
    | {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048}
    | {"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27}
    | {"num_attention_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 1}
    | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
    | {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
    | {"routed_scaling_factor": 1.0},
    # deepseek-ai/DeepSeek-V3, config.json: 4 of its 61 layers and a quarter of their experts, as a
    # rank of a gang holds them.
    "v3-slice": COMMON
    | {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168}
    | {"intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 4}
    | {"num_attention_heads": 128, "q_lora_rank": 1536, "first_k_dense_replace": 1}
    | {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8}
    | {"n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    | {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
}
SHAPES["small"] = SHAPES["v2-lite"] | {
    # For rehearsals on a CPU.
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def random_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    with_mtp: bool,
    in_fp8: bool = False,
    quantises: bool = False,
    kernels: Kernels | None = None,
) -> LoadedModel:
    """Build a random model.

    Args:
        in_fp8: Use FP8 weights.
        quantises: Also quantise the rows multiplied with them, like prefill does.
        kernels: Kernels to use; None for those of the device.
    """
    config = ModelConfig.from_dict(SHAPES[name])
    dispatch = Dispatch(config.n_routed_experts)
    with torch.device("meta"):
        network = DeepseekV3(config, dispatch)
        layer = MtpLayer(config, dispatch)
    generator = torch.Generator(device).manual_seed(1)
    network.rope.to(device)
    parts = [network, layer] if with_mtp else [network]
    for part in parts:
        if in_fp8:
            keep_fp8(part, lambda name: "lm_head" not in name)
        _fill(part, device, dtype, generator)
    chosen = kernels or create_kernels("auto", config, device, quantises=quantises)
    drafter: Drafter = NoDrafter()
    if with_mtp:
        drafter = MtpDrafter(network, layer.eval())
    process_weights_after_loading(network.eval(), chosen)
    drafter.process_weights_after_loading(chosen)
    kind = (dtype, device, config.max_position_embeddings, with_mtp, None)
    return LoadedModel(config, network, drafter, dispatch, chosen, *kind)


def _fill(part: nn.Module, device: torch.device, dtype: torch.dtype, made: Any) -> None:
    """Fill a module with weights that keep activations in range, and norms around 1."""
    for owner in part.modules():
        for name, tensor in list(owner.named_parameters(recurse=False)):
            value = _random(tensor, device, dtype, made)
            setattr(owner, name, nn.Parameter(value, requires_grad=False))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_meta:
                value = 0.1 * torch.randn(buffer.shape, device=device, generator=made)
                setattr(owner, name, value if buffer.dim() == 1 else value.abs())


def _random(like: Tensor, device: torch.device, dtype: torch.dtype, made: Any) -> Tensor:
    """Draw in slices, so that the fp32 numbers take little memory compared with the result."""
    is_fp8 = like.dtype == torch.float8_e4m3fn
    out = torch.empty(like.shape, dtype=like.dtype if is_fp8 else dtype, device=device)
    if like.dim() == 1:
        return out.copy_(0.5 + torch.rand(like.shape, device=device, generator=made))
    rows = out.view(-1, like.shape[-1])
    for part in rows.split(1 << 16):
        numbers = torch.randn(part.shape, device=device, generator=made)
        part.copy_(numbers * (1.0 if is_fp8 else like.shape[-1] ** -0.5))
    return out
