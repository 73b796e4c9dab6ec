"""What a step computes, by kind of device: an interface (base.py), a file per implementation."""

import logging

import torch

from core.config import AUTO
from model.config import ModelConfig
from model.kernels.base import PLAIN, Kernels

log = logging.getLogger(__name__)


def create_kernels(name: str, config: ModelConfig, device: torch.device) -> Kernels:
    """Those called ``name``; auto is native on CPUs that can have them, else plain.

    Raises ValueError if native ones are asked for by name and cannot be had.
    """
    if name == PLAIN.name:
        return PLAIN
    missing = _why_not_native(config, device)
    if not missing:
        from model.kernels.build import built
        from model.kernels.native import Native

        try:
            return Native(built())
        except (OSError, ValueError) as error:
            missing = str(error)
    if name != AUTO:
        raise ValueError(f"model.kernels: {name!r} cannot be had: {missing}; use auto or plain")
    if device.type == "cpu":
        log.warning("steps are slower than they could be, without native kernels: %s", missing)
    return PLAIN


def _why_not_native(config: ModelConfig, device: torch.device) -> str:
    from model.kernels.native import fits

    if device.type != "cpu":
        return f"they are for CPUs, not {device.type}"
    return "" if fits(config) else "they need heads and latents of a multiple of 16 values"
