"""Products with FP8 block matrices (GPU kernels, interpreted), compared with fp64 products of the
same quantised inputs. Blocks, tiles and slots have ragged edges."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.blocks import dense, random_blocks
from tandem.model.kernels.base import BLOCK, Fp8BlockWeight, Kernels
from tests.kernels import IS_INTERPRETED, TYPES
from tests.numerics import UNIT, assert_near

if not IS_INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from tandem.model.kernels.gpu import tiles  # noqa: E402
from tandem.model.kernels.gpu.fp8 import quantise  # noqa: E402
from tandem.model.kernels.gpu.kernels import TritonKernels  # noqa: E402

WRONG = {torch.float32: 2e-5, torch.float16: 2e-3}
NUM_SLOTS, DIM, WIDTH = 3, 200, 160
AS_THEY_ARE, QUANTISED = TritonKernels(8), TritonKernels(8, quantises=True)


def drawn(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=made).to(dtype)


def check(got: Tensor, wanted: Tensor, most: float) -> None:
    """Compare each row by its norm; ``wanted`` is in fp64."""
    assert got.shape == wanted.shape
    errors = (got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.max() < most, errors


def blocks(num_parts: int, rows: int, columns: int, num_slots: int = NUM_SLOTS) -> Fp8BlockWeight:
    return random_blocks(num_slots, num_parts, rows, columns, torch.Generator().manual_seed(1))


def read(x_NK: Tensor, kernels: Kernels) -> Tensor:
    """Return the inputs in fp64 as the kernels multiply them, quantised or not."""
    if kernels is AS_THEY_ARE:
        return x_NK.double()
    values, scales = quantise(x_NK, power_of_2_scales=False)
    scales_NK = scales.repeat_interleave(BLOCK, 1)[:, : x_NK.shape[1]]
    return values.double() * scales_NK


def mlp(
    x_ND: Tensor, w1: Fp8BlockWeight, w2: Fp8BlockWeight, slot: int, kernels: Kernels
) -> Tensor:
    up, down = dense(w1, 2, slot), dense(w2, 1, slot)
    gate, up = (read(x_ND, kernels) @ up.T).chunk(2, -1)
    return read((F.silu(gate) * up).to(x_ND.dtype), kernels) @ down.T


def most_wrong(kernels: Kernels, dtype: torch.dtype) -> float:
    """Return the error bound. Rounding may choose either of two FP8 values for a hidden value, and
    the interpreter may halve the result."""
    if kernels is AS_THEY_ARE:
        return WRONG[dtype]
    return 2e-2 if dtype == torch.float32 else 1e-1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("power_of_2_scales", [False, True])
def test_rows_are_quantised_by_the_largest_of_each_group(
    power_of_2_scales: bool, dtype: torch.dtype
) -> None:
    x = drawn(9, 2 * BLOCK + 30, dtype) * torch.logspace(-3, 2, 9)[:, None].to(dtype)
    x[3] = 0
    apart = torch.cat((x, x), 1)[:, : x.shape[1]]
    values, scales = quantise(apart, power_of_2_scales)
    filled = F.pad(x.float(), (0, BLOCK - 30)).unflatten(1, (-1, BLOCK))
    wanted = filled.abs().amax(-1).clamp(min=1e-4) / 448
    if power_of_2_scales:
        wanted = wanted.log2().ceil().exp2()
    assert_near(scales, wanted, 2 * UNIT[torch.float32] * wanted)
    scales = scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    back, exact = values.float() * scales, x.float() / scales
    # A step of FP8, or its smallest one. The interpreter halves values that round up to a power of
    # two.
    step = x.float().abs() / 8 + scales / 512
    is_told_right = exact.frexp().mantissa.abs() < 0.96
    assert ((back - x.float()).abs() <= step)[is_told_right].all()
    assert is_told_right.float().mean() > 0.8
    assert not back[3].any()


def cases(often: set[tuple[int, Kernels, torch.dtype]], *sizes: int) -> list[Any]:
    """Return all cases of ``sizes``, both kinds of kernels and both dtypes as parameters. Cases
    that are not in ``often`` are marked as slow."""
    return [
        pytest.param(*one, marks=() if one in often else pytest.mark.slow)
        for one in product(sizes, (AS_THEY_ARE, QUANTISED), TYPES)
    ]


@pytest.mark.parametrize(
    ("num_rows", "kernels", "dtype"),
    cases(
        {
            (130, QUANTISED, TYPES[1]),
            *((17, kernels, TYPES[0]) for kernels in (AS_THEY_ARE, QUANTISED)),
            (1, AS_THEY_ARE, TYPES[1]),
        },
        *(1, 17, 130),
    ),
)
def test_dense_products(num_rows: int, kernels: Kernels, dtype: torch.dtype) -> None:
    w, x = blocks(1, WIDTH, DIM, 1), drawn(num_rows, DIM, dtype)
    wanted = read(x, kernels) @ dense(w, 1, 0).T
    one = kernels.pack(Fp8BlockWeight(w.values[0], w.scales[0]))
    check(kernels.linear(x, one, WIDTH), wanted, WRONG[dtype])
    in_fp32 = kernels.linear(x, one, WIDTH, in_fp32=True)
    assert in_fp32.dtype == torch.float32
    check(in_fp32, wanted, WRONG[torch.float32])
    w1, w2 = blocks(2, WIDTH, DIM, 1), blocks(1, DIM, WIDTH, 1)
    got = kernels.fused_experts(x, None, None, *kernels.pack_experts(w1, w2))
    check(got, mlp(x, w1, w2, 0, kernels), most_wrong(kernels, dtype))


@pytest.mark.parametrize("kernels", [AS_THEY_ARE, QUANTISED])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 520), (17, 1000), (70, 640)])
def test_sums_in_parts(
    num_rows: int, width: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide products with few outputs are summed in parts; the last part is shorter."""
    monkeypatch.setattr(tiles, "MIN_PART_WIDTH", BLOCK)
    w, x = blocks(1, 40, width, 1), drawn(num_rows, width, torch.float16)
    one = Fp8BlockWeight(w.values[0], w.scales[0])
    got = kernels.linear(x, one, 40)
    check(got, read(x, kernels) @ dense(w, 1, 0).T, WRONG[torch.float16])
    assert torch.equal(kernels.linear(x, one, 40), got)


@pytest.mark.parametrize(
    ("per_token", "kernels", "dtype"),
    cases(
        {
            (60, QUANTISED, TYPES[1]),
            (2, AS_THEY_ARE, TYPES[0]),
        },
        *(2, 20, 60),
    ),
)
def test_experts(per_token: int, kernels: Kernels, dtype: torch.dtype) -> None:
    """Some pairs are on other ranks and one expert has none. Each has few rows or more than a
    tile."""
    num_slots, num_tokens = NUM_SLOTS + 1, 5
    w1, w2 = blocks(2, WIDTH, DIM, num_slots), blocks(1, DIM, WIDTH, num_slots)
    x, packed = drawn(num_tokens, DIM, dtype), kernels.pack_experts(w1, w2)
    of = torch.tensor([0, 2, num_slots, 2, 0, 0, 3])
    slots_P = of[torch.arange(per_token * num_tokens) % len(of)]
    tokens_P = torch.arange(len(slots_P)) // per_token
    most = most_wrong(kernels, dtype)
    got = kernels.fused_experts(x, None, slots_P, *packed)
    for slot in (0, 2, 3):
        mine = slots_P == slot
        check(got[mine], mlp(x[tokens_P[mine]], w1, w2, slot, kernels), most)
    turned = tokens_P.flip(0)
    got = kernels.fused_experts(x, turned, slots_P, *packed)
    mine = slots_P == 2
    check(got[mine], mlp(x[turned[mine]], w1, w2, 2, kernels), most)
    assert kernels.fused_experts(x[:0], None, slots_P[:0], *packed).shape == (0, DIM)
