"""What a step computes, by kind of device: an interface (base.py), a file per implementation."""

import logging
import os
from shutil import which

import torch

from core.config import AUTO
from model.checkpoint.config import ModelConfig
from model.kernels.base import PLAIN, Kernels

log = logging.getLogger(__name__)
MOST_SHARED_BYTES = 227 * 1024
"""That a program of kernels for GPUs takes: what Hopper and Blackwell's B200 let it have."""


def create_kernels(
    name: str, config: ModelConfig, device: torch.device, quantises: bool = False
) -> Kernels:
    """Those called ``name``; auto is what was written for the device if it can be had, else plain.
    Where weights stay FP8 they ``quantise`` rows for products with them too (prefill), or not.

    Raises ValueError if others are asked for by name and cannot be had.
    """
    if name == PLAIN.name:
        return PLAIN
    own, make = ("native", _native) if device.type == "cpu" else ("triton", _triton)
    if name not in (AUTO, own):
        raise ValueError(f"model.kernels: {name!r} are not for {device.type}; use auto or {own}")
    if own == "triton" and not (os.environ.get("CC") or which("gcc") or which("clang")):
        raise ValueError(
            f"model.kernels={name!r}: Triton compiles a launcher for the driver, and there is no C "
            "compiler: install gcc and the headers of the C library, or use plain"
        )
    try:
        return make(config, device, quantises)
    except (OSError, ValueError, ImportError) as error:
        if name != AUTO:
            raise ValueError(
                f"model.kernels: {name!r} cannot be had: {error}; use auto or plain"
            ) from error
        plain = Kernels()
        plain.why_plain = f"without {own} kernels: {error}"
        log.warning("steps are slower than they could be, %s", plain.why_plain)
        return plain


def check_widths(config: ModelConfig, lanes: int) -> None:
    """Raises ValueError for a model that kernels with these lanes do not compute."""
    widths = config.kv_lora_rank, config.v_head_dim, config.latent_dim
    if any(width % lanes for width in widths):
        raise ValueError(f"they need heads and latents of a multiple of {lanes} values")


def _native(config: ModelConfig, device: torch.device, quantises: bool) -> Kernels:
    from model.kernels.native import LANES, Native

    check_widths(config, LANES)
    from model.kernels.build import built

    return Native(built())


def _triton(config: ModelConfig, device: torch.device, quantises: bool) -> Kernels:
    from model.kernels.gpu.kernels import Triton

    by_powers = config.quantization is not None and config.quantization.scale_fmt == "ue8m0"
    card = torch.cuda.get_device_properties(device)
    num_bytes = getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block)
    if num_bytes < MOST_SHARED_BYTES:
        raise ValueError(
            f"{card.name} has {num_bytes >> 10} KB of shared memory for a program, and some of "
            f"these take {MOST_SHARED_BYTES >> 10} KB (H100, H200 and B200 have them)"
        )
    return Triton(card.multi_processor_count, quantises, by_powers)
