"""The kernels that a test is about: this machine's own, or with TRITON_INTERPRET=1, in a process of
its own, those for GPUs, without one."""

import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

from tandem.model.kernels.base import Kernels
from tests.often import often

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    from tests.interpreted import prepare_once_a_launch

    prepare_once_a_launch()
TYPES = [torch.float32, torch.float16 if IS_INTERPRETED else torch.bfloat16]
"""Triton's interpreter multiplies the bits of bf16 numbers, as if these were the numbers."""
gpu_only = pytest.mark.skipif(not IS_INTERPRETED, reason="of kernels for GPUs alone")
native_only = pytest.mark.skipif(IS_INTERPRETED, reason="of native kernels alone")


def often_interpreted(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Return ``values`` as parameters. The interpreter is slow: those that ``kept`` lacks are
    marked slow for it."""
    listed = list(values)
    return often(listed, kept if IS_INTERPRETED else listed)


@cache
def ours() -> Kernels:
    """The first use compiles native ones."""
    if IS_INTERPRETED:
        from tandem.model.kernels.gpu.kernels import TritonKernels

        return TritonKernels(num_processors=8)
    from tandem.model.kernels.build import build_library
    from tandem.model.kernels.native import NativeKernels

    return NativeKernels(build_library())
