"""Triton kernels, some of which vendor libraries replace (``model.kernels=vendor``).

FlashMLA computes attention of many pairs. cuBLAS computes products of many quantised rows with FP8
matrices.

Shape legend: X rows, K their width, M outputs, G groups of 128 values.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.kernels.base import BLOCK, AttentionMetadata, Fp8BlockWeight
from tandem.model.kernels.gpu.flashmla import FlashMla
from tandem.model.kernels.gpu.fp8 import quantise
from tandem.model.kernels.gpu.kernels import TritonKernels

MIN_CUBLAS_ROWS = 1024
"""Minimum number of rows for cuBLAS. From this number on, it is the fastest (pull request 49932 of
vLLM)."""


class VendorKernels(TritonKernels):
    """Triton kernels with FlashMLA and cuBLAS. ``attention`` is FlashMLA's operator."""

    name = "vendor"

    def __init__(self, attention: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._flash = FlashMla(attention)

    def _attend(
        self,
        nope_HXN: Tensor,
        up_HNC: Tensor,
        pe_XHR: Tensor,
        attn: AttentionMetadata,
        lens_BQ: Tensor,
    ) -> Tensor:
        fits = self._flash.fits(len(nope_HXN), attn, lens_BQ)
        attend = self._flash.attend if fits else super()._attend
        return attend(nope_HXN=nope_HXN, up_HNC=up_HNC, pe_XHR=pe_XHR, attn=attn, lens_BQ=lens_BQ)

    def _product(
        self, x_XK: Tensor, w: Fp8BlockWeight, num_parts: int, dtype: torch.dtype
    ) -> Tensor:
        (num_rows, width), half = x_XK.shape, w.values.shape[1] // num_parts
        is_even = num_rows % 4 == width % (4 * BLOCK) == half % BLOCK == 0
        is_many = num_rows >= MIN_CUBLAS_ROWS and dtype == torch.bfloat16
        if not (self._quantises and is_many and is_even):
            return super()._product(x_XK=x_XK, w=w, num_parts=num_parts, dtype=dtype)
        return by_cublas(quantise(x_XK, self._power_of_2_scales), w)


def by_cublas(x: Fp8BlockWeight, w: Fp8BlockWeight) -> Tensor:
    """Multiply quantised rows x by one FP8 matrix, which gives [X, M] bf16.

    In memory, the scales of x are contiguous along rows, those of w along groups. The numbers of
    rows and of groups must be multiples of 4 (pull request 166752 of pytorch).
    """
    scales_XG = x.scales.t().contiguous().t()
    of = F.ScalingType
    scaled = x.values, w.values[0].t(), scales_XG, of.BlockWise1x128, w.scales[0].t()
    return F.scaled_mm(*scaled, of.BlockWise128x128, output_dtype=torch.bfloat16)
