"""A small random checkpoint with the shipped tokenizer and a good drafter.

For tests of the whole path of a request in which the text does not matter. A step costs a third of
the shipped checkpoint's. The MTP layer repeats the last main layer on nearly the same input. So
most drafts are right, and yet they depend on the whole context, as all tokens do. Any wrong cache
entry therefore changes the output.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import tiny
from tandem.core.config import TINY_MODEL

SIZES = {"vocab_size": 2048, "num_hidden_layers": 2, "max_position_embeddings": 1024}
FIRST, LAST = (f"model.layers.{i}." for i in range(2))
UNLIKE = 0.02
"""Share of its input that the MTP layer does not see. The first layer, which MTP lacks, adds this
share to the embeddings; MTP adds this share of the hidden state to them."""


def write_small(folder: Path, num_mtp_layers: int = 1) -> None:
    config = tiny.write_tiny(folder, seed=41, num_nextn_predict_layers=num_mtp_layers, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[FIRST + name] *= UNLIKE
    for mtp in (f"model.layers.{SIZES['num_hidden_layers'] + i}." for i in range(num_mtp_layers)):
        last = {name: tensor for name, tensor in tensors.items() if name.startswith(LAST)}
        tensors |= {name.replace(LAST, mtp): tensor.clone() for name, tensor in last.items()}
        tensors[mtp + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        of_embedding = torch.diag(1 / tensors[mtp + "enorm.weight"])
        of_hidden = tensors[mtp + "eh_proj.weight"][:, config.hidden_size :] * UNLIKE
        tensors[mtp + "eh_proj.weight"] = torch.cat((of_embedding, of_hidden), 1)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)
