"""Entries between pages and staging, by layers: one copy after the other here, on GPUs in one."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

Copy = Callable[[Sequence[Tensor], Tensor, Tensor, bool], None]
"""Of the ``slots_T`` of ``layers`` [num_slots, W] each, and ``rows`` [num_layers, T, W] of the same
integer type: into the rows (``is_gather``), or from them."""


def copy_by_layer(
    layers: Sequence[Tensor], slots_T: Tensor, rows_LTW: Tensor, is_gather: bool
) -> None:
    for layer, rows_TW in zip(layers, rows_LTW, strict=True):
        if is_gather:
            torch.index_select(layer, 0, slots_T, out=rows_TW)
        else:
            layer.index_copy_(0, slots_T, rows_TW)


def copy_on(device: torch.device) -> Copy:
    if device.type != "cuda" or find_spec("triton") is None:
        return copy_by_layer
    from kv_transfer.gpu_copies import copy_all_layers

    return copy_all_layers
