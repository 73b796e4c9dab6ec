"""GPU kernel that copies entries of all layers between pages and staging in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES_PER_PROGRAM = 2048
"""Values that one Triton program copies: 16 KiB of int64."""


def copy_all_layers(
    layers: Sequence[Tensor], slots_T: Tensor, rows_LTW: Tensor, is_gather: bool
) -> None:
    """Copy entries between all layers and ``rows_LTW`` (see ``Copy`` in caches.py)."""
    assert rows_LTW.is_contiguous() and all(layer.is_contiguous() for layer in layers)
    num_layers, num_tokens, width = rows_LTW.shape
    # A copy from unpinned memory would block until all work launched before is complete.
    addresses_L = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64)
    if slots_T.is_cuda:
        addresses_L = addresses_L.pin_memory().to(slots_T.device, non_blocking=True)
    _copy[(triton.cdiv(num_tokens * width, VALUES_PER_PROGRAM), num_layers)](
        *(addresses_L, slots_T, rows_LTW, num_tokens * width),
        WIDTH=width,
        IS_GATHER=is_gather,
        BLOCK=VALUES_PER_PROGRAM,
        num_warps=8,
    )


@triton.jit
def _copy(
    addresses_L,
    slots_T,
    rows_LTW,
    num_values,
    WIDTH: tl.constexpr,
    IS_GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < num_values
    slot = tl.load(slots_T + i // WIDTH, mask=is_valid, other=0)
    entry = tl.load(addresses_L + layer).to(rows_LTW.dtype) + slot * WIDTH + i % WIDTH
    row = rows_LTW + layer * num_values + i
    if IS_GATHER:
        tl.store(row, tl.load(entry, mask=is_valid), mask=is_valid)
    else:
        tl.store(entry, tl.load(row, mask=is_valid), mask=is_valid)
