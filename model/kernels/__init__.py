"""Kernels of the forward pass: an interface (base.py), and one file per implementation."""

import logging
import os
from shutil import which

import torch

from tandem.core.config import AUTO
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import TORCH_KERNELS, Kernels

log = logging.getLogger(__name__)
HOPPER = 9
"""Major compute capability that the GPU kernels require. On other GPUs, tiles may exceed the
hardware's limits."""


def create_kernels(
    name: str, config: ModelConfig, device: torch.device, quantises: bool = False
) -> Kernels:
    """Create the kernels that ``name``, the value of ``model.kernels``, selects for ``device``.

    Args:
        name: "auto" selects the device's own kernels, and torch if these are unavailable.
        config: Configuration of the model.
        device: Device of the rank.
        quantises: Whether products with FP8 weights quantise their inputs too (on prefill ranks).

    Raises:
        ValueError: The kernels were selected by name and are unavailable, or a GPU is used without
            a C compiler.
    """
    if name == TORCH_KERNELS.name:
        return TORCH_KERNELS
    on_gpu = device.type != "cpu"
    makers = {"triton": _triton, "vendor": _vendor} if on_gpu else {"native": _native}
    chosen = next(iter(makers)) if name == AUTO else name
    if chosen not in makers:
        known = " or ".join([AUTO, *makers])
        raise ValueError(f"model.kernels={name!r}: not available on {device.type}; use {known}")
    if on_gpu and not (os.environ.get("CC") or which("gcc") or which("clang")):
        raise ValueError(
            f"model.kernels={name!r}: Triton needs a C compiler for its launchers, and there is "
            "none; install gcc and the headers of the C library, or use torch"
        )
    try:
        return makers[chosen](config, device, quantises)
    except (OSError, ValueError, ImportError) as error:
        if name != AUTO:
            raise ValueError(
                f"model.kernels={name!r}: cannot be used: {error}; use auto or torch"
            ) from error
        plain = Kernels()
        plain.fallback_reason = f"{chosen} kernels cannot be used: {error}"
        log.warning("steps are slower than they could be: %s", plain.fallback_reason)
        return plain


def check_widths(config: ModelConfig, dim_multiple: int) -> None:
    """Raise ValueError if a width of the model is not a multiple of ``dim_multiple``."""
    widths = config.kv_lora_rank, config.v_head_dim, config.latent_dim
    if any(width % dim_multiple for width in widths):
        raise ValueError(f"head and latent widths must be multiples of {dim_multiple}")


def _native(config: ModelConfig, device: torch.device, quantises: bool) -> Kernels:
    from tandem.model.kernels.native import LANES, NativeKernels

    check_widths(config, LANES)
    from tandem.model.kernels.build import build_library

    return NativeKernels(build_library())


def _triton(config: ModelConfig, device: torch.device, quantises: bool) -> Kernels:
    from tandem.model.kernels.gpu.kernels import TritonKernels

    return TritonKernels(*_gpu_arguments(config, device, quantises))


def _vendor(config: ModelConfig, device: torch.device, quantises: bool) -> Kernels:
    from tandem.model.kernels.gpu import flashmla, vendor

    return vendor.VendorKernels(flashmla.operator(), *_gpu_arguments(config, device, quantises))


def _gpu_arguments(
    config: ModelConfig, device: torch.device, quantises: bool
) -> tuple[int, bool, bool]:
    power_of_2_scales = config.quantization is not None and config.quantization.scale_fmt == "ue8m0"
    card = torch.cuda.get_device_properties(device)
    if card.major != HOPPER:
        raise ValueError(
            f"these kernels need a Hopper GPU (H100, H200), but {card.name} has compute capability "
            f"{card.major}.{card.minor}"
        )
    return card.multi_processor_count, quantises, power_of_2_scales
