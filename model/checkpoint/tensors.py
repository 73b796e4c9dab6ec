"""Operations on rows that are stored as (nested) dataclasses of tensors.

The first axis of every tensor is the row. Fields that are not tensors are left unchanged.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

Rows = TypeVar("Rows")
_ALIGNMENT = 8


def map_tensors(function: Callable[..., Tensor], rows: Rows, *others: Any) -> Rows:
    """Return ``rows`` with each tensor replaced by ``function(tensor, *tensors)``.

    ``tensors`` are the tensors of the same field in ``others``.
    """
    result: Any = rows
    if isinstance(rows, Tensor):
        result = function(rows, *others)
    elif is_dataclass(rows):
        names = [field.name for field in fields(rows)]
        trees = (rows, *others)
        parts = (map_tensors(function, *(getattr(tree, name) for tree in trees)) for name in names)
        result = type(result)(*parts)
    return result


def select_rows(rows: Rows, index_B: Tensor) -> Rows:
    """Return the rows ``index_B``, in this order."""
    return map_tensors(lambda tensor: tensor.index_select(0, index_B), rows)


def write_rows(table: Rows, index_B: Tensor, rows: Rows) -> None:
    """Write ``rows`` to the rows ``index_B`` of ``table``, in place."""
    map_tensors(lambda stored, new: stored.index_copy_(0, index_B, new), table, rows)


def upload(rows: Rows, device: torch.device) -> Rows:
    """Copy all host tensors to ``device`` in one asynchronous copy from pinned memory.

    A copy from pageable memory would make the host wait for all earlier launches. Tensors that are
    on the device already are returned as they are.
    """
    if device.type == "cpu":
        return rows
    waiting = [tensor for tensor in list_tensors(rows) if tensor.device.type == "cpu"]
    sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in waiting)
    starts = list(accumulate(sizes, initial=0))
    packed = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=True)
    for start, tensor in zip(starts, waiting, strict=True):
        packed[start : start + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
    packed = packed.to(device, non_blocking=True)
    parts = (
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, waiting, strict=True)
    )
    return map_tensors(lambda tensor: next(parts) if tensor.device.type == "cpu" else tensor, rows)


def download(rows: Rows) -> Rows:
    """Start to copy all tensors to the host. The result is valid once the device has executed the
    copies."""
    return map_tensors(_to_host, rows)


def list_tensors(rows: object) -> list[Tensor]:
    """Return all tensors, in the order of the fields."""
    if isinstance(rows, Tensor):
        return [rows]
    parts = [getattr(rows, field.name) for field in fields(rows)] if is_dataclass(rows) else []
    return [tensor for part in parts for tensor in list_tensors(part)]


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
