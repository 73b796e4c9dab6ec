"""Checkpoint tensors into a network that was built on the meta device (spec §2, §6).

One tensor is in memory beside the weights at any time. Parameters carry the checkpoint's names;
only routed experts are fused, so each of theirs is a slice of one parameter.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from model.checkpoint_files import CheckpointFiles, dequantise
from model.config import ModelConfig
from model.deepseek import DeepseekV3

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_SCALE = "_scale_inv"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: a whole parameter, or rows of one expert's matrix."""

    name: str
    expert: int | None = None
    part: str = ""

    def view(self, parameter: Tensor) -> Tensor:
        if self.expert is None:
            return parameter
        matrix = parameter[self.expert]
        if self.part == "down":
            return matrix
        half = matrix.shape[0] // 2
        return matrix[:half] if self.part == "gate" else matrix[half:]


def has_mtp(path: Path, config: ModelConfig) -> bool:
    """Whether the checkpoint really holds its first MTP layer: re-quantised copies often drop
    it while config.json still promises one."""
    if config.num_nextn_predict_layers == 0:
        return False
    with CheckpointFiles(path) as files:
        return f"model.layers.{config.num_hidden_layers}.eh_proj.weight" in files


def load_weights(
    network: DeepseekV3,
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = False,
) -> None:
    """Fill every parameter and buffer of ``network`` from the checkpoint in ``path``.

    Floating tensors become ``dtype``, the routing bias stays fp32. Raises ValueError naming
    tensor, file and both shapes for anything missing, unknown, misshapen or unreadable.
    """
    loader = _Loader(network, dtype, device)
    with CheckpointFiles(path) as files:
        names = list(files.names())
        for name in track(names, "loading", console=Console(stderr=True), disable=not progress):
            loader.load(files, name)
    loader.finish(path)


class _Loader:
    def __init__(self, network: DeepseekV3, dtype: torch.dtype, device: torch.device) -> None:
        self._network = network
        self._config = network.config
        self._dtype = dtype
        self._device = device
        self._slots = dict(network.named_parameters()) | {
            name: buffer for name, buffer in network.named_buffers() if buffer.is_meta
        }
        self._ready: dict[str, Tensor] = {}
        self._loaded: dict[str, int] = {}

    def load(self, files: CheckpointFiles, name: str) -> None:
        if self._ignored(name):
            return
        target = self._target(name)
        if target.name not in self._slots:
            raise ValueError(
                f"{files.path / files.file_of[name]}: unknown tensor {name}; "
                f"this is not a {self._config.model_type} checkpoint as config.json describes it"
            )
        place = target.view(self._materialise(target.name))
        tensor = files.read(name)
        if place.shape != tensor.shape:
            raise ValueError(
                f"{files.path / files.file_of[name]}: {name} has shape {tuple(tensor.shape)}, "
                f"config.json makes it {tuple(place.shape)}"
            )
        place.copy_(self._plain(files, name, tensor))
        self._loaded[target.name] = self._loaded.get(target.name, 0) + 1

    def finish(self, path: Path) -> None:
        """Check that nothing is missing, then hand the tensors to the network."""
        embedding = self._ready.get("model.embed_tokens.weight")
        tied = self._config.tie_word_embeddings and "lm_head.weight" not in self._ready
        if tied and embedding is not None:
            self._ready["lm_head.weight"] = embedding
            self._loaded["lm_head.weight"] = 1
        missing = [n for n in self._slots if self._loaded.get(n, 0) != self._num_pieces(n)]
        if missing:
            raise ValueError(
                f"{path}: {len(missing)} tensors are missing or incomplete, "
                f"such as {', '.join(sorted(missing)[:3])}"
            )
        for name, tensor in self._ready.items():
            _assign(self._network, name, tensor)

    def _ignored(self, name: str) -> bool:
        if name.endswith((_SCALE, "rotary_emb.inv_freq")):
            return True
        match = _LAYER.fullmatch(name)
        if match is None or int(match[1]) < self._config.num_hidden_layers:
            return False
        num_served = int(self._network.has_mtp)
        served = int(match[1]) - self._config.num_hidden_layers < num_served
        return not served or match[2] in _MTP_COPIES

    def _target(self, name: str) -> Target:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return Target(name)
        fused = "down_proj" if match[3] == "down" else "gate_up_proj"
        if int(match[2]) >= self._config.n_routed_experts:
            return Target(name)
        return Target(f"{match[1]}.{fused}", int(match[2]), match[3])

    def _num_pieces(self, name: str) -> int:
        if name.endswith("experts.gate_up_proj"):
            return 2 * self._config.n_routed_experts
        return self._config.n_routed_experts if name.endswith("experts.down_proj") else 1

    def _materialise(self, name: str) -> Tensor:
        if name not in self._ready:
            meta = self._slots[name]
            dtype = torch.float32 if name.endswith("e_score_correction_bias") else self._dtype
            self._ready[name] = torch.empty(meta.shape, dtype=dtype, device=self._device)
        return self._ready[name]

    def _plain(self, files: CheckpointFiles, name: str, tensor: Tensor) -> Tensor:
        """``tensor``, dequantised if it is FP8; its scale may lie in another file."""
        if tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor
        if tensor.dtype != torch.float8_e4m3fn or tensor.dim() != 2:
            raise ValueError(
                f"{files.path / files.file_of[name]}: {name} is {tensor.dim()}-d {tensor.dtype}; "
                "only bf16, fp16 and fp32 tensors, and fp8 e4m3 matrices, can be loaded"
            )
        scale, quantization = name + _SCALE, self._config.quantization
        if scale not in files or quantization is None:
            raise ValueError(
                f"{files.path / files.file_of[name]}: {name} is {tensor.dtype} but has no {scale} "
                "or config.json no quantization_config"
            )
        rows, columns = quantization.block_size
        scale_inv = files.read(scale)
        expected = (-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
        if tuple(scale_inv.shape) != expected:
            raise ValueError(
                f"{files.path / files.file_of[scale]}: {scale} has shape "
                f"{tuple(scale_inv.shape)}, expected {expected}"
            )
        return dequantise(tensor, scale_inv, (rows, columns))


def _assign(network: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
