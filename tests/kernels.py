"""The kernels under test: by default this machine's own. With TRITON_INTERPRET=1, which needs a
separate process, the GPU kernels run without a GPU."""

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
"""Dtypes under test. Triton's interpreter multiplies bf16 numbers as integers, so fp16 is used
there."""
gpu_only = pytest.mark.skipif(not IS_INTERPRETED, reason="of kernels for GPUs alone")
native_only = pytest.mark.skipif(IS_INTERPRETED, reason="of native kernels alone")


def often_interpreted(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Return ``values`` as parameters. Under the slow interpreter, those not in ``kept`` are marked
    slow."""
    listed = list(values)
    return often(listed, kept if IS_INTERPRETED else listed)


@cache
def ours() -> Kernels:
    """Return the kernels under test. The first use compiles the native ones."""
    if IS_INTERPRETED:
        from tandem.model.kernels.gpu.kernels import TritonKernels

        return TritonKernels(num_processors=8)
    from tandem.model.kernels.build import build_library
    from tandem.model.kernels.native import NativeKernels

    return NativeKernels(build_library())
