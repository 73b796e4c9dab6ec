"""Copies between host and device that nobody waits for: they take their turn on the device."""

import torch
from torch import Tensor


def to_device(values: list[int], device: torch.device) -> Tensor:
    """Integers [N] on the device. From memory that is not pinned the host would wait for all
    that was launched before."""
    if device.type == "cpu":
        return torch.tensor(values)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once the device has come this far."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
