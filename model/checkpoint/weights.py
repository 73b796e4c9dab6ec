"""Loads checkpoint tensors into modules that were built on the meta device.

Tensors are read one by one, so that loading needs little memory besides the weights. Parameters
have the names of the checkpoint's tensors. If the module is only a part of the model, its names
lack a prefix. Routed experts are the exception: each is a slice of a fused parameter. Experts of
other ranks are not read.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.model.checkpoint.config import Fp8Blocks, ModelConfig
from tandem.model.checkpoint.files import CheckpointFiles, dequantise
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.experts import Experts
from tandem.model.network.layers import Linear

log = logging.getLogger(__name__)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight(_scale_inv)?$")
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_SCALE = "_scale_inv"
_DERIVED = "rotary_emb.inv_freq"
_UNUSED = (".input_scale", ".k_scale", ".prob_scale", ".q_scale", ".v_scale")
"""Suffixes of tensors with static scales of FP8 activations and caches. Tandem quantises
activations dynamically and has no FP8 caches."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Open files of a checkpoint, and how to load them.

    Attributes:
        dtype: Dtype of parameters.
        device: Device of parameters.
        keep_fp8: FP8 matrices stay FP8 where the kernels can read them.
        may_draft: Whether the rank drafts. Prefill ranks do not: they only write the cache entries
            of MTP layers, for which they need no experts.
        ignored_keys: ``model.ignore_config_keys``.
    """

    files: CheckpointFiles
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    keep_fp8: bool = False
    may_draft: bool = True
    ignored_keys: tuple[str, ...] = ()


def mtp_prefix(config: ModelConfig, number: int) -> str:
    """Return the prefix of the tensor names of MTP layer ``number``, counted from 0."""
    return f"model.layers.{config.num_hidden_layers + number}."


def num_mtp_layers(files: CheckpointFiles, config: ModelConfig) -> int:
    """Return the number of MTP layers in the checkpoint's files: as stated in config.json, or 0.

    Re-quantised copies often lack the layers although their config.json still states the number.
    Raises ValueError if only some of them are missing.
    """
    promised = config.num_nextn_predict_layers
    names = [f"{mtp_prefix(config, number)}eh_proj.weight" for number in range(promised)]
    missing = [name for name in names if name not in files]
    if len(missing) not in (0, promised):
        raise ValueError(
            f"{files.path / 'config.json'}: num_nextn_predict_layers = {promised}, but "
            f"{missing[0]} is missing; download it, or set the number to {names.index(missing[0])}"
        )
    return promised - len(missing)


def load_network(checkpoint: Checkpoint, dispatch: Dispatch) -> DeepseekV3:
    """Load the main model, which has all tensors except those of MTP layers.

    Raises ValueError as ``load_weights`` does.
    """
    unused = [name for name in checkpoint.files.names() if name.endswith(_UNUSED)]
    if unused:
        log.info("%d scale tensors are not used, such as %s", len(unused), unused[0])
    with torch.device("meta"):
        network = DeepseekV3(checkpoint.config, dispatch)
    network.rope.to(checkpoint.device)
    num_layers = checkpoint.config.num_hidden_layers
    layers = ((name, _LAYER.match(name)) for name in checkpoint.files.names())
    own_names = (name for name, match in layers if not match or int(match[1]) < num_layers)
    load_weights(network, own_names, checkpoint)
    return network.eval()


def load_mtp(layer: nn.Module, checkpoint: Checkpoint, number: int, *, is_whole: bool) -> None:
    """Load MTP layer ``number``, without its copies of the main model's embedding and head.

    Unless ``is_whole``, the layer's MLP is deleted and its experts are not read. Raises
    ValueError as ``load_weights`` does.
    """
    prefix = mtp_prefix(checkpoint.config, number)
    own_names = (name for name in checkpoint.files.names() if name.startswith(prefix))
    own_names = (
        name
        for name in own_names
        if name.removeprefix(prefix).removesuffix(_SCALE) not in _MTP_COPIES
    )
    if not is_whole:
        del layer.mlp
        own_names = (name for name in own_names if not name.startswith(prefix + "mlp."))
    load_weights(module=layer, names=own_names, checkpoint=checkpoint, prefix=prefix)


def load_weights(
    module: nn.Module, names: Iterable[str], checkpoint: Checkpoint, prefix: str = ""
) -> None:
    """Load every parameter and buffer of ``module`` from the tensors ``names``.

    A tensor's name is ``prefix`` followed by its name in the module. Parameters get
    ``checkpoint.dtype``; buffers (the routing bias) keep their dtype. Raises ValueError if a tensor
    is missing, unknown, unreadable or of the wrong shape; the message names tensor, file and both
    shapes.
    """
    files = checkpoint.files
    config = checkpoint.config
    if checkpoint.keep_fp8:
        keep_fp8(module, lambda name: files.is_fp8(prefix + name))
    tensors = _materialise(module, checkpoint)
    places: dict[str, list[Tensor]] = defaultdict(list)
    for item in tensors.items():
        for name, target in _pieces(module, *item):
            places[prefix + name].append(target)
    weights = set(places)
    for name in names:
        if name in places:
            _fill(places=places.pop(name), files=files, name=name, fp8=config.quantization)
        elif not (
            name.endswith((_DERIVED, *_UNUSED))
            or name.removesuffix(_SCALE) in weights
            or _is_elsewhere(name, config)
        ):
            raise ValueError(
                f"{files.path_of(name)}: unknown tensor {name}; "
                f"this is not a {config.model_type} checkpoint as config.json describes it"
            )
    if config.tie_word_embeddings and places.pop("lm_head.weight", None) is not None:
        tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        module.load_state_dict(tied, strict=False, assign=True)
    if places:
        some = ", ".join(sorted(places)[:3])
        raise ValueError(f"{files.path}: {len(places)} tensors are missing, such as {some}")


def keep_fp8(module: nn.Module, is_fp8: Callable[[str], bool]) -> None:
    """Make matrices that are FP8 in the checkpoint stay FP8. Must be called before loading.

    Layers without ``may_keep_fp8`` are skipped. All routed experts of a layer stay FP8 if any of
    them is FP8 in the checkpoint.
    """
    for name, part in module.named_modules():
        if isinstance(part, Experts):
            weights = [f"{name}.{expert}.gate_proj.weight" for expert in part.expert_ids]
        else:
            weights = [f"{name}.weight"] if isinstance(part, Linear) and part.may_keep_fp8 else []
        if any(map(is_fp8, weights)):
            part.keep_fp8()


def _pieces(module: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each checkpoint tensor that belongs in ``tensor``, and the part that it
    fills.

    A fused parameter of experts has several parts. Replicas of an expert have the same name.
    """
    owner, _, leaf = name.rpartition(".")
    path, _, fused = owner.rpartition(".")
    experts = module.get_submodule(path)
    if not isinstance(experts, Experts):
        yield name, tensor
        return
    parts = ("gate_proj", "up_proj") if fused == "gate_up" else ("down_proj",)
    for expert, matrix in zip(experts.expert_ids, tensor, strict=True):
        for part, target in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{path}.{expert}.{part}.{leaf}", target


def _is_elsewhere(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to a routed expert. Another rank may hold this expert."""
    match = _EXPERT.search(name)
    return match is not None and int(match[1]) < config.n_routed_experts


def _fill(places: list[Tensor], files: CheckpointFiles, name: str, fp8: Fp8Blocks | None) -> None:
    tensor = files.read(name)
    if places[0].shape != tensor.shape:
        raise ValueError(
            f"{files.path_of(name)}: {name} has shape {tuple(tensor.shape)}, "
            f"but config.json requires {tuple(places[0].shape)}"
        )
    if places[0].dtype != torch.float8_e4m3fn:
        tensor = _dequantised(files=files, name=name, tensor=tensor, fp8=fp8)
    elif tensor.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{files.path_of(name)}: {name} is {tensor.dtype}, but other experts are FP8"
        )
    for target in places:
        target.copy_(tensor)


def _dequantised(
    files: CheckpointFiles, name: str, tensor: Tensor, fp8: Fp8Blocks | None
) -> Tensor:
    """Return ``tensor``, dequantised if it is FP8. Its scale may be in another file."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor
    if tensor.dtype != torch.float8_e4m3fn or tensor.dim() != 2:
        raise ValueError(
            f"{files.path_of(name)}: {name} is {tensor.dim()}-d {tensor.dtype}; "
            "only bf16, fp16 and fp32 tensors, and fp8 e4m3 matrices, can be loaded"
        )
    scale = name + _SCALE
    if scale not in files or fp8 is None:
        raise ValueError(
            f"{files.path_of(name)}: {name} is {tensor.dtype}, but {scale} or "
            "quantization_config in config.json is missing"
        )
    rows, columns = fp8.weight_block_size
    scale_inv = files.read(scale)
    expected = (-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"{files.path_of(scale)}: {scale} has shape {tuple(scale_inv.shape)}, expected "
            f"{expected}"
        )
    return dequantise(tensor, scale_inv, (rows, columns))


def _materialise(module: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Allocate memory for the parameters and buffers on the meta device, and return these by
    name."""
    slots = {}
    for name, meta in [*module.named_parameters(), *module.named_buffers()]:
        if meta.is_meta:
            is_usual = isinstance(meta, nn.Parameter) and meta.dtype == torch.float32
            dtype = checkpoint.dtype if is_usual else meta.dtype
            slots[name] = torch.empty(meta.shape, dtype=dtype, device=checkpoint.device)
    module.load_state_dict(slots, strict=False, assign=True)
    return slots
