"""What a step computes, by kind of device: an interface (base.py), a file per implementation."""

import logging
import os
from shutil import which

import torch

from tandem.core.config import AUTO
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import PLAIN, Kernels

log = logging.getLogger(__name__)
HOPPER = 9
"""The compute capability that kernels for GPUs are made for: elsewhere some would not fit."""


def create_kernels(
    name: str, config: ModelConfig, device: torch.device, quantises: bool = False
) -> Kernels:
    """Those called ``name``; auto is what was written for the device if it can be had, else torch.
    Where weights stay FP8 they ``quantise`` rows for products with them too (prefill), or not.

    Raises ValueError if others are asked for by name and cannot be had.
    """
    if name == PLAIN.name:
        return PLAIN
    on_gpu = device.type != "cpu"
    makers = {"triton": _triton, "vendor": _libraries} if on_gpu else {"native": _native}
    own = next(iter(makers)) if name == AUTO else name
    if own not in makers:
        known = " or ".join([AUTO, *makers])
        raise ValueError(f"model.kernels: {name!r} are not for {device.type}; use {known}")
    if on_gpu and not (os.environ.get("CC") or which("gcc") or which("clang")):
        raise ValueError(
            f"model.kernels={name!r}: Triton compiles a launcher for the driver, and there is no C "
            "compiler: install gcc and the headers of the C library, or use torch"
        )
    try:
        return makers[own](config, device, quantises)
    except (OSError, ValueError, ImportError) as error:
        if name != AUTO:
            raise ValueError(
                f"model.kernels: {name!r} cannot be had: {error}; use auto or torch"
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
    from tandem.model.kernels.native import LANES, Native

    check_widths(config, LANES)
    from tandem.model.kernels.build import built

    return Native(built())


def _triton(config: ModelConfig, device: torch.device, quantises: bool) -> Kernels:
    from tandem.model.kernels.gpu.kernels import Triton

    return Triton(*_for_gpu(config, device, quantises))


def _libraries(config: ModelConfig, device: torch.device, quantises: bool) -> Kernels:
    from tandem.model.kernels.gpu import flashmla, libraries

    return libraries.Libraries(flashmla.operator(), *_for_gpu(config, device, quantises))


def _for_gpu(config: ModelConfig, device: torch.device, quantises: bool) -> tuple[int, bool, bool]:
    by_powers = config.quantization is not None and config.quantization.scale_fmt == "ue8m0"
    card = torch.cuda.get_device_properties(device)
    if card.major != HOPPER:
        raise ValueError(
            f"they are made for Hopper (H100, H200), and {card.name} has compute capability "
            f"{card.major}.{card.minor}"
        )
    return card.multi_processor_count, quantises, by_powers
