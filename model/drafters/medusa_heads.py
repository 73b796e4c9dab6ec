"""Medusa heads (arXiv 2401.10774): their files and their computation.

Shape legend: B rows, D hidden, V vocabulary.
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.files import find_file, pop_tensor, read_tensors
from tandem.model.network.layers import Linear

FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


class MedusaHead(nn.Module):
    """Residual blocks x + silu(W x + b), then the head's own output matrix, or ``shared`` if it has
    none."""

    def __init__(
        self, blocks: list[tuple[Tensor, Tensor]], own_head: Tensor | None, shared: Linear
    ):
        super().__init__()
        self.blocks = nn.ModuleList(loaded_linear(weight) for weight, _ in blocks)
        self._biases = [bias for _, bias in blocks]
        self.head = None if own_head is None else loaded_linear(own_head)
        self._shared = (shared,)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return raw fp32 logits [B, V]."""
        for block, bias_D in zip(self.blocks, self._biases, strict=True):
            x_BD = x_BD + F.silu(block(x_BD) + bias_D)
        head = self._shared[0] if self.head is None else self.head
        logits_BV: Tensor = head(x_BD, in_fp32=True)
        return logits_BV


def loaded_linear(weight: Tensor) -> Linear:
    """Wrap an existing weight in a ``Linear``, as after loading it from a checkpoint."""
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def read_heads(folder: Path, checkpoint: Checkpoint, shared: Linear) -> list[MedusaHead]:
    """Read all heads of a folder, in the checkpoint's dtype and on its device.

    On ranks that never draft, the heads have shapes but no values. Raises ValueError naming file,
    tensor and remedy if heads are missing or do not fit this model.
    """
    file = find_file(folder, FILES)
    tensors = {_author_name(name): tensor for name, tensor in read_tensors(file).items()}
    size = checkpoint.config.hidden_size
    vocab = checkpoint.config.vocab_size
    device = checkpoint.device if checkpoint.may_draft else torch.device("meta")

    def take(name: str, *shape: int) -> Tensor:
        return pop_tensor(file, tensors, name, *shape).to(device, checkpoint.dtype, copy=True)

    heads: list[MedusaHead] = []
    while any(name.startswith(f"{len(heads)}.") for name in tensors):
        i = len(heads)
        blocks: list[tuple[Tensor, Tensor]] = []
        while f"{i}.{len(blocks)}.linear.weight" in tensors:
            prefix = f"{i}.{len(blocks)}.linear"
            weight = take(f"{prefix}.weight", size, size)
            bias = take(f"{prefix}.bias", size)
            blocks.append((weight, bias))
        of_its_own = tensors.keys() & {f"{i}.{len(blocks)}.weight", f"{i}.weight"}
        own_head = take(of_its_own.pop(), vocab, size) if of_its_own else None
        heads.append(MedusaHead(blocks, own_head, shared))
    if tensors or not heads:
        some = ", ".join(sorted(tensors)[:3]) or "none"
        raise ValueError(f"{file}: is not a file of Medusa heads; unknown tensors: {some}")
    return heads


def _author_name(name: str) -> str:
    """Translate vLLM's name of a tensor to the authors' name.

    The output matrix of head i becomes ``i.weight``. The authors' name also contains the number of
    blocks, which vLLM's name lacks.
    """
    return _HEAD.sub(r"\1.weight", _BLOCK.sub(r"\1.\2.linear.\3", name))
