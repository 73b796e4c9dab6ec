"""Calls of the libraries that replace GPU kernels (interpreted).

Stand-ins reject the arguments that the libraries reject, and compute what the libraries document.
"""

import inspect
import mmap
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.blocks import dense, random_blocks
from tandem.core.config import TINY_MODEL
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels import create_kernels
from tandem.model.kernels.base import BLOCK, AttentionMetadata, Fp8BlockWeight
from tests.kernels import gpu_only
from tests.often import often

pytest.importorskip("triton")

from tandem.model.kernels.gpu import flashmla, vendor  # noqa: E402
from tandem.model.kernels.gpu.fp8 import quantise  # noqa: E402
from tandem.model.kernels.gpu.kernels import TritonKernels  # noqa: E402

KIND = torch.float16
"""Triton's interpreter multiplies bf16 numbers as integers, so fp16 is used."""
DRAFT_LENGTH_POLICIES, NUM_PAGES = [5, 64, 65, 190], 3
NOPE, LATENT, ROPE = 32, 512, 64


class FlashMla:
    """Dense decode with the checks of FlashMLA's source (csrc/api/dense_decode.h). Several rows are
    causal from the end."""

    def __init__(self) -> None:
        self.num_split = 0

    def __call__(
        self,
        q: Tensor,
        kcache: Tensor,
        head_size_v: int,
        seqlens_k: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        is_causal: bool,
        tile_scheduler_metadata: Tensor | None,
        num_splits: Tensor | None,
    ) -> tuple[Tensor, ...]:
        num_seqs, num_q, num_heads, width = q.shape
        assert q.dtype == kcache.dtype and q.dtype.itemsize == 2
        assert seqlens_k.dtype == block_table.dtype == torch.int32
        assert q.stride(3) == kcache.stride(3) == block_table.stride(1) == 1
        assert seqlens_k.is_contiguous() and seqlens_k.shape == (num_seqs,)
        assert (width, head_size_v, kcache.shape[1:]) == (576, 512, (64, 1, 576))
        assert len(block_table) == num_seqs and block_table.shape[1] * 64 >= seqlens_k.max()
        q.view(num_seqs, num_q * num_heads, width)
        split = torch.cat((torch.zeros(1, dtype=torch.int32), seqlens_k))
        if tile_scheduler_metadata is None or num_splits is None:
            self.num_split += 1
            tile_scheduler_metadata = num_splits = split
        assert torch.equal(num_splits, split), "that of another pass"
        out = torch.empty(num_seqs, num_q, num_heads, head_size_v, dtype=q.dtype)
        for b, length in enumerate(seqlens_k.tolist()):
            slots = kcache[block_table[b].long()].flatten(0, 2)[:length].double()
            last_Q = torch.arange(num_q) + length - num_q if is_causal else torch.tensor([length])
            is_seen_QS = torch.arange(length) <= last_Q[:, None]
            scores = q[b].double() @ slots.T * softmax_scale
            p_QHS = scores.masked_fill(~is_seen_QS[:, None], float("-inf")).softmax(-1)
            out[b] = (p_QHS @ slots[:, :head_size_v]).to(q.dtype)
        return out, scores, tile_scheduler_metadata, num_splits


def drawn(*shape: int, seed: int = 0, kind: torch.dtype = KIND) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)


def asked(num_heads: int, num_q: int, page_size: int = 64) -> tuple[Any, ...]:
    """Return queries, both matrices, lengths, and pages that hold NaN after the contexts."""
    num_seqs = len(DRAFT_LENGTH_POLICIES)
    lens_BQ = (
        torch.tensor(DRAFT_LENGTH_POLICIES)[:, None] - torch.arange(num_q).flip(0)
    ).contiguous()
    width = -(-NUM_PAGES * 64 // page_size)
    table_BP = torch.randperm(num_seqs * width).view(num_seqs, width) + 1
    cache = drawn(1 + num_seqs * width, page_size, LATENT + ROPE, seed=1)
    for length, pages in zip(DRAFT_LENGTH_POLICIES, table_BP, strict=True):
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        cache.flatten(0, 1)[slots[length:]] = float("nan")
    num_rows = num_seqs * num_q
    q_XHK = drawn(num_rows, num_heads, NOPE + ROPE, seed=2)
    ups = drawn(num_heads, LATENT, NOPE, seed=3) / 8, drawn(num_heads, 16, LATENT, seed=4) / 16
    angles = drawn(num_rows, ROPE // 2, seed=5, kind=torch.float32)
    how = AttentionMetadata(angles.cos(), angles.sin(), True, cache, table_BP, 0.03)
    return q_XHK, *ups, how, lens_BQ


@gpu_only
@pytest.mark.parametrize(
    ("num_heads", "num_q", "is_interleaved"),
    [
        *((64, 1, True), (16, 4, False)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((64, 1, False), (16, 4, True))),
        pytest.param(128, 2, True, marks=pytest.mark.slow),
        pytest.param(128, 2, False, marks=pytest.mark.slow),
    ],
)
def test_flashmla_is_asked_for_what_our_own_kernel_gives(
    num_heads: int, num_q: int, is_interleaved: bool
) -> None:
    """All layers of a pass use one split of the contexts, and the next pass uses another."""
    *rest, how, lens_BQ = asked(num_heads, num_q)
    how, flash = how._replace(is_interleaved=is_interleaved), FlashMla()
    kernels = vendor.VendorKernels(flash, 8)
    wanted = TritonKernels(8).mla_attend(*rest, how, lens_BQ)
    for _ in range(2):
        got = kernels.mla_attend(*rest, how, lens_BQ)
        assert (got - wanted).abs().max() < 2e-2 * wanted.abs().max()
    assert flash.num_split == 1
    shorter = lens_BQ - 1
    got = kernels.mla_attend(*rest, how, shorter)
    assert flash.num_split == 2
    wanted = TritonKernels(8).mla_attend(*rest, how, shorter)
    assert (got - wanted).abs().max() < 2e-2 * wanted.abs().max()


@gpu_only
def test_no_page_is_read_behind_a_table() -> None:
    *rest, how, lens_BQ = asked(64, 1)
    how, beyond = how._replace(cache=how.cache.nan_to_num(0.5)), lens_BQ + NUM_PAGES * 64
    got = vendor.VendorKernels(FlashMla(), 8).mla_attend(*rest, how, beyond)
    wanted = TritonKernels(8).mla_attend(*rest, how, beyond)
    assert (got - wanted).abs().max() < 2e-2 * wanted.abs().max()


@gpu_only
@pytest.mark.parametrize(
    "what",
    often(
        ["few pairs", "small pages", "a tree", "fp32", "uneven heads"], ["small pages", "a tree"]
    ),
)
def test_what_flashmla_does_not_compute_our_own_kernel_does(what: str) -> None:
    num_heads = {"few pairs": 16, "uneven heads": 96}.get(what, 64)
    *rest, how, lens_BQ = asked(num_heads, 1, 32 if what == "small pages" else 64)
    if what == "fp32":
        rest, how = [one.float() for one in rest], how._replace(cache=how.cache.float())
    if what == "a tree":
        finite = how.cache.nan_to_num(0.5)
        how = how._replace(cache=finite, bits_BQ=torch.zeros_like(lens_BQ))
    flash = FlashMla()
    got = vendor.VendorKernels(flash, 8).mla_attend(*rest, how, lens_BQ)
    assert (
        torch.equal(got, TritonKernels(8).mla_attend(*rest, how, lens_BQ)) and flash.num_split == 0
    )


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: Any,
    scale_b: Tensor,
    scale_recipe_b: Any,
    output_dtype: torch.dtype,
) -> Tensor:
    """Scaled product with block scales, with the checks of ScaledBlas.cpp in pytorch/pytorch."""
    (num_rows, width), num_out = mat_a.shape, mat_b.shape[1]
    assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
    assert mat_a.is_contiguous() and mat_b.t().is_contiguous() and num_rows % 4 == 0
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    assert (scale_recipe_a, scale_recipe_b) == recipes
    num_groups = -(-width // 128)
    assert scale_a.shape == (num_rows, num_groups) and scale_a.stride() == (1, num_rows)
    by_fours = -(-num_groups // 4) * 4
    assert scale_b.shape == (by_fours, -(-num_out // 128)) and scale_b.stride() == (1, by_fours)
    a = mat_a.double() * scale_a.repeat_interleave(128, 1)[:, :width]
    scale = scale_b.repeat_interleave(128, 0)[:width].repeat_interleave(128, 1)[:, :num_out]
    return (a @ (mat_b.double() * scale)).to(output_dtype)


@gpu_only
@pytest.mark.parametrize("num_parts", [1, 2])
def test_cublas_is_asked_for_what_our_own_products_give(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(vendor, "MIN_CUBLAS_ROWS", 8)
    w = random_blocks(1, num_parts, 2 * BLOCK, 4 * BLOCK, torch.Generator().manual_seed(1))
    x = drawn(12, 4 * BLOCK, kind=torch.bfloat16)
    kernels = vendor.VendorKernels(FlashMla(), 8, True, False)
    x_rounded = quantise(x, power_of_2_scales=False)
    exact = x_rounded.values.double() * x_rounded.scales.repeat_interleave(BLOCK, 1)
    wanted = exact @ dense(w, num_parts, 0).T
    got = kernels._product(x, w, num_parts, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert (got.double() - wanted).abs().max() < 1e-2 * wanted.abs().max()


@gpu_only
@pytest.mark.parametrize(
    ("num_rows", "rows", "columns", "kind"),
    [
        (4, 256, 512, torch.bfloat16),
        (13, 256, 512, torch.bfloat16),
        (12, 200, 512, torch.bfloat16),
        (12, 256, 500, torch.bfloat16),
        (12, 256, 640, torch.bfloat16),
        (12, 256, 512, torch.float32),
    ],
)
def test_products_that_cublas_does_not_have_are_our_own(
    num_rows: int, rows: int, columns: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        pytest.fail("asked for")

    monkeypatch.setattr(F, "scaled_mm", refused)
    monkeypatch.setattr(vendor, "MIN_CUBLAS_ROWS", 8)
    w = random_blocks(1, 1, rows, columns, torch.Generator().manual_seed(1))
    x = drawn(num_rows, columns, kind=torch.bfloat16)
    one = Fp8BlockWeight(w.values[0], w.scales[0])
    given = x, one, rows, kind == torch.float32
    got = vendor.VendorKernels(FlashMla(), 8, True, False).linear(*given)
    assert torch.equal(got, TritonKernels(8, True, False).linear(*given))


def test_torch_multiplies_blocks_by_the_names_that_we_use() -> None:
    known = inspect.signature(F.scaled_mm).parameters
    assert [*inspect.signature(scaled_mm).parameters][:6] == [*known][:6]
    assert "output_dtype" in known


def test_who_has_no_flashmla_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmla, "find_spec", lambda name: None)
    monkeypatch.setenv("CC", "cc")
    config = ModelConfig.from_dir(TINY_MODEL)
    with pytest.raises(ValueError, match="'vendor': cannot be used: .*tandem-serve.gpu"):
        create_kernels("vendor", config, torch.device("cuda"))


def test_the_library_that_is_installed_has_the_operator_that_we_know() -> None:
    """The schema is read from the library's file, because loading it takes CUDA."""
    try:
        wheel = distribution("sglang-kernel")
    except PackageNotFoundError:
        pytest.skip("the extra gpu is not installed")
    file = Path(str(wheel.locate_file("sgl_kernel/flashmla_ops.abi3.so")))
    assert has_text(file, flashmla.SCHEMA.removeprefix("sgl_kernel::"))


def has_text(file: Path, text: str) -> bool:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return held.find(text.encode()) >= 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_flashmla_on_a_device() -> None:
    *rest, how, lens_BQ = asked(128, 2)
    here = [one.cuda() for one in rest]
    told = AttentionMetadata(*(one.cuda() if isinstance(one, Tensor) else one for one in how))
    given = *here, told, lens_BQ.cuda()
    own = TritonKernels(132).mla_attend(*given)
    theirs = vendor.VendorKernels(flashmla.operator(), 132).mla_attend(*given)
    assert (own - theirs).abs().max() < 2e-2 * own.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("num_parts", [1, 2])
def test_cublas_on_a_device(num_parts: int) -> None:
    w = random_blocks(1, num_parts, 2 * BLOCK, 4 * BLOCK, torch.Generator().manual_seed(1))
    x, here = (
        drawn(2048, 4 * BLOCK, kind=torch.bfloat16).cuda(),
        Fp8BlockWeight(*(p.cuda() for p in w)),
    )
    own = TritonKernels(132, True, False)._product(x, here, num_parts, x.dtype)
    theirs = vendor.by_cublas(quantise(x, power_of_2_scales=False), here)
    assert (own - theirs).abs().max() < 2e-2 * own.abs().max()
