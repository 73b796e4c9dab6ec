"""Entries between pages and staging, by layers: one copy after the other here, on GPUs in one."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Of ``layers`` [num_slots, W] each and ``rows`` [num_layers, T, W] of one integer type."""

    def gather(self, layers: Sequence[Tensor], slots_T: Tensor, rows_LTW: Tensor) -> None: ...

    def scatter(self, layers: Sequence[Tensor], slots_T: Tensor, rows_LTW: Tensor) -> None: ...


class LayerByLayer:
    def gather(self, layers: Sequence[Tensor], slots_T: Tensor, rows_LTW: Tensor) -> None:
        for layer, rows_TW in zip(layers, rows_LTW, strict=True):
            torch.index_select(layer, 0, slots_T, out=rows_TW)

    def scatter(self, layers: Sequence[Tensor], slots_T: Tensor, rows_LTW: Tensor) -> None:
        for layer, rows_TW in zip(layers, rows_LTW, strict=True):
            layer.index_copy_(0, slots_T, rows_TW)


def copies_on(device: torch.device) -> Copies:
    if device.type != "cuda" or find_spec("triton") is None:
        return LayerByLayer()
    from kv_transfer.gpu_copies import AllLayers

    return AllLayers()
