"""Every GPU kernel compiles for Hopper, at the sizes of DeepSeek-V2-Lite and V3, without spilling
registers. This needs no GPU. Their results are tested in test_kernels.py and test_drawing.py."""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.request import SamplingParams
from tandem.kv_transfer.gpu_copies import copy_all_layers
from tandem.model.kernels.base import BLOCK, AttentionMetadata, Fp8BlockWeight, Routing
from tandem.model.network.batch import Segments
from tandem.model.sampling.sampler import SamplingRows
from tests.kernels import IS_INTERPRETED

if IS_INTERPRETED or sys.platform != "linux":
    pytest.skip("nothing is compiled", allow_module_level=True)

from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from benchmarks.gpu.compiled import MOST_SHARED_BYTES, Hopper, figures  # noqa: E402
from tandem.model.kernels.gpu import compiling, route  # noqa: E402
from tandem.model.kernels.gpu.kernels import TritonKernels  # noqa: E402
from tandem.model.kernels.gpu.vendor import VendorKernels  # noqa: E402

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled instead of launched."""
    names: list[str] = []
    launch = JITFunction.run

    def run(kernel: JITFunction, *args: object, grid: object, warmup: bool, **rest: object) -> None:
        made = figures(launch(kernel, *args, grid=grid, warmup=True, **rest))
        assert made.shared_bytes <= MOST_SHARED_BYTES
        assert not made.num_spilled and not made.is_serialized, kernel.__name__
        names.append(kernel.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(driver, "_active", Hopper())
    return names


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def weights(*shape: int, kind: torch.dtype = BF16) -> Tensor:
    """Return memory whose values are never read."""
    return torch.empty(shape, dtype=kind)


def fp8(num_slots: int, rows: int, columns: int) -> Fp8BlockWeight:
    shape = num_slots, -(-rows // BLOCK), -(-columns // BLOCK)
    return Fp8BlockWeight(weights(num_slots, rows, columns, kind=FP8), zeros(*shape).float())


def often(*sizes: Any, beside: Sequence[Any]) -> list[Any]:
    """Return parameters: ``sizes``, and those of ``beside`` marked as slow."""
    return [*sizes, *(pytest.param(size, marks=pytest.mark.slow) for size in beside)]


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("kind", [BF16, torch.float32])
def test_attention_of_prompts(compiled: list[str], kind: torch.dtype, num_heads: int) -> None:
    q, kv_b, cache = zeros(130, num_heads, 192), zeros(num_heads, 256, 512), zeros(5, 64, 576)
    pages, angles = torch.tensor([[1, 2, 3, 4]]), zeros(130, 32).float()
    how = AttentionMetadata(angles, angles, True, cache.to(kind), pages, 0.1)
    told = how, Segments((130,), (250,), torch.tensor([130])), 128
    assert TritonKernels(132).mla_prefill(q.to(kind), kv_b.to(kind), *told).shape == (
        130,
        num_heads,
        128,
    )
    assert compiled == ["_attend"]


def test_it_is_told_how_long_compiling_takes(compiled: list[str]) -> None:
    """Compile time is reported once for each kernel and kind of arguments, so that a rank that
    compiles does not count as stalled."""
    kernels, told_s = TritonKernels(132), [0.0]
    for _ in range(3):
        kernels.rms_norm(zeros(3, 11_200), zeros(11_200), 1e-6)
        told_s.append(kernels.compile_s())
    assert told_s[1] > 0 and told_s[1] == told_s[2] == told_s[3]


def test_compiling_that_failed_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a failed compilation stays excused, so that the clock of the stall detection
    never jumps."""
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("tandem.model.kernels.gpu.compiling.time", clock)
    told = compiling.CompileTimer()
    told.start()
    now += 3
    told.start()
    now += 2
    told.stop()
    assert told.seconds() == 5
    told.start()
    now += 1000
    assert told.seconds() == 5 + compiling.MAX_KERNEL_COMPILE_S


@pytest.mark.parametrize("pages", often((64, False), beside=[(64, True), (16, False)]))
@pytest.mark.parametrize(("num_heads", "num_q"), [(16, 1), (16, 2), (16, 4), (128, 1), (128, 4)])
def test_attention(
    compiled: list[str], num_heads: int, num_q: int, pages: tuple[int, bool]
) -> None:
    page_size, is_tree = pages
    num_rows, cache, angles = 8 * num_q, zeros(4, page_size, 576), zeros(8 * num_q, 32).float()
    q, up_k, up_v = (
        zeros(num_rows, num_heads, 192),
        zeros(num_heads, 512, 128),
        zeros(num_heads, 128, 512),
    )
    table, lens = torch.zeros(8, 9, dtype=torch.int64), torch.zeros(8, num_q, dtype=torch.int64)
    how = AttentionMetadata(angles, angles, True, cache, table, 0.1, lens if is_tree else None)
    assert TritonKernels(132).mla_attend(q, up_k, up_v, how, lens).shape == (
        num_rows,
        num_heads,
        128,
    )
    assert compiled == ["_attend", "_merge"]


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("num_heads", "num_groups", "num_q"), [(32, 8, 1), (56, 7, 4), (8, 8, 10)])
def test_grouped_attention(
    compiled: list[str], num_heads: int, num_groups: int, num_q: int, is_tree: bool
) -> None:
    num_rows, cache = 8 * num_q, zeros(4, 64, 2 * num_groups * 128)
    angles, table = zeros(num_rows, 64).float(), torch.zeros(8, 9, dtype=torch.int64)
    lens = torch.zeros(8, num_q, dtype=torch.int64)
    how = AttentionMetadata(angles, angles, False, cache, table, 0.1, lens if is_tree else None)
    out = TritonKernels(132).gqa_attend(zeros(num_rows, num_heads, 128), how, lens)
    assert out.shape == (num_rows, num_heads, 128)
    assert compiled == ["_attend_groups", "_merge"]


@pytest.mark.parametrize("num_moves", [1, 4, 63])
def test_moves(compiled: list[str], num_moves: int) -> None:
    caches, slots = [zeros(4, 64, 576), zeros(4, 64, 576)], torch.zeros(8, num_moves).long()
    TritonKernels(132).copy_slots(caches, slots, slots)
    assert compiled == ["_move"]


@pytest.mark.parametrize("dim", [2048, 7168])
def test_rows(compiled: list[str], dim: int) -> None:
    kernels, x, kv, angles = TritonKernels(132), zeros(4, dim), zeros(4, 576), zeros(4, 32).float()
    kernels.rms_norm(x, x[0], 1e-6)
    kernels.add_rms_norm(x, x, x[0], 1e-6)
    slots = torch.zeros(4, dtype=torch.int64)
    how = AttentionMetadata(angles, angles, True, zeros(4, 64, 576), slots[None], 0.1)
    kernels.write_mla_cache(kv, zeros(512), 1e-6, how, slots)
    more = kernels.combine(zeros(4, 8, dim), zeros(4, 8).float(), x)
    kernels.add_rms_norm(x, more, x[0], 1e-6)
    assert compiled == ["_rms_norm", "_rms_norm", "_entry", "_rms_norm"]


@pytest.mark.parametrize("num_heads", [16, 128])
def test_queries_that_flashmla_reads(compiled: list[str], num_heads: int) -> None:
    def operator(q: Tensor, *_: object) -> tuple[Tensor, ...]:
        return q[..., :512], q, q, q

    lens, angles = torch.full((2, 4), 64), zeros(8, 32).float()
    how = AttentionMetadata(angles, angles, True, zeros(4, 64, 576), torch.zeros(2, 3).long(), 0.1)
    q, ups = zeros(8, num_heads, 192), (zeros(num_heads, 512, 128), zeros(num_heads, 128, 512))
    VendorKernels(operator, 132).mla_attend(q, *ups, how, lens)
    assert compiled == ["_rotate"]


@pytest.mark.parametrize("num_pairs", often(6, 255, beside=[24, 160]))
def test_experts(compiled: list[str], num_pairs: int) -> None:
    """Test from few to many pairs for each expert."""
    w1, w2 = weights(8, 2816, 2048), weights(8, 2048, 1408)
    x, slots = zeros(num_pairs, 2048), torch.zeros(num_pairs, dtype=torch.int64)
    TritonKernels(132).fused_experts(x, None, slots, w1, w2)
    assert compiled == ["_by_slot"] * (num_pairs > 64) + ["_gate_up", "_down"]


@pytest.mark.parametrize("kind", often(BF16, torch.float32, beside=[torch.float16]))
@pytest.mark.parametrize("num_pairs", often(256, 8 * 1024 + 1, beside=[768]))
def test_experts_of_many_pairs(compiled: list[str], num_pairs: int, kind: torch.dtype) -> None:
    w1, w2 = weights(8, 2816, 2048, kind=kind), weights(8, 2048, 1408, kind=kind)
    slots = torch.zeros(num_pairs, dtype=torch.int64)
    TritonKernels(132).fused_experts(zeros(num_pairs, 2048).to(kind), None, slots, w1, w2)
    by_slot = ["_count", "_place"] if num_pairs > 8 * 1024 else ["_by_slot"]
    assert compiled == [*by_slot, "_product", "_silu_mul", "_product"]


@pytest.mark.parametrize(
    ("num_ranks", "num_pairs", "tiles"), [(1, 128, {16}), (1, 512, {64}), (8, 512, {16})]
)
def test_tiles_of_experts_fit_the_pairs_that_are_here(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_pairs: int, tiles: set[int]
) -> None:
    """Tiles are not chosen by the pairs of all ranks, of which seven of eight are elsewhere."""
    used = set()

    def run(kernel: JITFunction, *_: object, BLOCK_M: int = 0, **__: object) -> None:
        used.add(BLOCK_M)

    monkeypatch.setattr(JITFunction, "run", run)
    w1, w2 = zeros(8, 64, 32), zeros(8, 32, 32)
    x, slots = zeros(num_pairs, 32), torch.full((num_pairs,), 8)
    slots[: num_pairs // num_ranks] = torch.arange(num_pairs // num_ranks) % 8
    TritonKernels(132).fused_experts(x, None, slots, w1, w2, num_ranks)
    assert used - {0} == tiles


@pytest.mark.parametrize("num_pairs", often(6, 512, beside=[200, 255]))
def test_experts_in_blocks_of_fp8(compiled: list[str], num_pairs: int) -> None:
    x, slots = zeros(num_pairs, 7168), torch.zeros(num_pairs, dtype=torch.int64)
    TritonKernels(132).fused_experts(x, None, slots, fp8(8, 4096, 7168), fp8(8, 7168, 2048))
    assert compiled == ["_by_slot"] * (num_pairs > 64) + ["_gate_up", "_down"]


@pytest.mark.parametrize(
    ("quantises", "num_rows"),
    [
        *((False, 1), (True, 128), (True, 4096)),
        *(pytest.param(False, num, marks=pytest.mark.slow) for num in (32, 128, 4096)),
        *(pytest.param(True, num, marks=pytest.mark.slow) for num in (1, 32)),
    ],
)
def test_dense_products_in_blocks_of_fp8(
    compiled: list[str], quantises: bool, num_rows: int
) -> None:
    kernels, x = TritonKernels(132, quantises, power_of_2_scales=True), zeros(num_rows, 7168)
    kernels.linear(x, Fp8BlockWeight(*(part[0] for part in fp8(1, 2112, 7168))), 2112)
    kernels.fused_experts(x, None, None, fp8(1, 4096, 7168), fp8(1, 7168, 2048))
    each = ["_quantise", "_product"] if quantises else ["_product"]
    in_parts = [*each, "_add"] if num_rows <= 128 else each
    assert compiled == [*in_parts, *in_parts, "_silu_mul", *in_parts]


@pytest.mark.parametrize("num_pairs", often(6, 4096, beside=[255]))
def test_experts_of_rows_in_fp8(compiled: list[str], num_pairs: int) -> None:
    x, slots = zeros(num_pairs // 2, 7168), torch.zeros(num_pairs, dtype=torch.int64)
    TritonKernels(132, quantises=True).fused_experts(
        x, None, slots, fp8(8, 4096, 7168), fp8(8, 7168, 2048)
    )
    each = ["_quantise", "_product"]
    assert compiled == ["_by_slot", *each, "_silu_mul", *each]


@pytest.mark.parametrize("num_tokens", [4, 64])
def test_routing(compiled: list[str], num_tokens: int) -> None:
    how, bias = Routing((256, 8, 4, 8), True, True, True, -float("inf"), 2.5), zeros(256).float()
    TritonKernels(132).route(zeros(num_tokens, 7168), zeros(256, 7168), bias, how)
    how = Routing((64, 1, 1, 6), *[False] * 3, 0.0, 1.0)
    TritonKernels(132).route(zeros(num_tokens, 2048), zeros(64, 2048), None, how)
    route.choose(zeros(4, 64).float()[None], None, how)
    TritonKernels(132).fused_experts(zeros(4, 64), None, None, zeros(1, 64, 64), zeros(1, 64, 32))
    assert compiled == ["_logits", "_choose", "_logits", "_choose", "_choose", "_silu_mul"]


@pytest.mark.parametrize("num_tokens", often(129_280, beside=[102_400]))
def test_sampling(compiled: list[str], num_tokens: int) -> None:
    rows = SamplingRows.of([SamplingParams(temperature=1.0, seed=1)] * 2, torch.device("cpu"))
    places = torch.zeros(2, 4, dtype=torch.int64)
    TritonKernels(132).sample_tokens(zeros(2, 4, num_tokens).float(), rows, places)
    TritonKernels(132).filtered_log_probs(zeros(2, 4, num_tokens).float(), rows)
    begun = ["_scan", *["narrow"] * 16]
    assert compiled == [*begun, "_score", "_merge", *begun, "_weigh", "_filter"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_copies_of_all_layers(compiled: list[str], dtype: torch.dtype) -> None:
    layers, rows = [torch.zeros(9, 144, dtype=dtype)] * 3, torch.zeros(3, 5, 144, dtype=dtype)
    for is_gather in (True, False):
        copy_all_layers(layers, torch.zeros(5, dtype=torch.int64), rows, is_gather)
    assert compiled == ["_copy", "_copy"]
