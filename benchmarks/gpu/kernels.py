"""Compare each kernel with fp64 on the same inputs, and its time with its floor."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import floors
from benchmarks.gpu.ceilings import rates
from benchmarks.gpu.device import Device
from benchmarks.gpu.floors import Work
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import SHAPES
from benchmarks.harness.blocks import dense, random_blocks
from tandem.core.request import SamplingParams
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels import create_kernels
from tandem.model.kernels.base import (
    BLOCK,
    TORCH_KERNELS,
    AttentionMetadata,
    Fp8BlockWeight,
    Kernels,
    Weights,
)
from tandem.model.network.batch import Segments
from tandem.model.network.moe import routing_of
from tandem.model.sampling.sampler import SamplingRows

PAGE_SIZE = 64
BF16 = torch.bfloat16
MOST_WRONG = 2e-2
"""Maximum relative error; for bf16 products half of it is rounding."""


def run(device: Device, say: Say) -> None:
    names = ["small"] if device.is_rehearsal else ["v2-lite", "v3-slice"]
    for name in names:
        config = ModelConfig.from_dict(SHAPES[name])
        kernels = create_kernels("auto", config, device.kind)
        for num_rows, num_q, context in ((1, 1, 4096), (32, 1, 4096), (32, 4, 4096), (8, 4, 32768)):
            size = (2, num_q, 100) if device.is_rehearsal else (num_rows, num_q, context)
            attention(device, say, name, config, kernels, *size)
        for num_tokens in (100,) if device.is_rehearsal else (1024, 4096):
            _prompt(device, say, name, config, kernels, num_tokens)
        for num_tokens in (1, 4, 32, 128, 512):
            _experts(device, say, name, config, kernels, num_tokens)
            _routing(device, say, name, config, kernels, num_tokens)
            _rows(device, say, name, config, kernels, num_tokens)
            _sampling(device, say, name, config, kernels, num_tokens)
        if kernels.supports_fp8_blocks:
            quantising = create_kernels("auto", config, device.kind, quantises=True)
            forms = [("by rows as they are", kernels), ("by FP8 rows", quantising)]
            for num_tokens in (1, 32, 128, 4096):
                dense_fp8(device, say, name, config, forms, num_tokens)


def draw(device: Device, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device.kind) * scale).to(BF16)


def error(got: Tensor, wanted: Tensor) -> float:
    """Return the relative error in the norm; NaN if either input has one."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def _tell(
    device: Device, say: Say, what: str, run: Callable[[], object], work: Work, wrong: float
) -> None:
    took, floor = device.cold_s(run), work.floor_s(rates())
    is_right = wrong <= MOST_WRONG
    say(what, is_right=is_right, error=wrong, us=1e6 * took, of_floor=floor / took)


def attention(
    device: Device,
    say: Say,
    name: str,
    config: ModelConfig,
    kernels: Kernels,
    num_rows: int,
    num_q: int,
    context: int,
) -> None:
    c, heads = config, config.num_attention_heads
    per_row = -(-context // PAGE_SIZE)
    cache = draw(device, 1 + num_rows * per_row, PAGE_SIZE, c.latent_dim)
    table = torch.randperm(num_rows * per_row, device=device.kind).view(num_rows, -1) + 1
    lens = torch.arange(context - num_q + 1, context + 1, device=device.kind)
    lens = lens.expand(num_rows, -1).contiguous()
    q = draw(device, num_rows * num_q, heads, c.qk_head_dim)
    up_k = draw(device, heads, c.kv_lora_rank, c.qk_nope_head_dim, scale=c.kv_lora_rank**-0.5)
    up_v = draw(device, heads, c.v_head_dim, c.kv_lora_rank, scale=c.kv_lora_rank**-0.5)
    angle = torch.rand(num_rows * num_q, c.qk_rope_head_dim // 2, device=device.kind)
    cos, sin = angle.cos(), angle.sin()

    def attend(kernels: Kernels, rows: slice, kind: torch.dtype) -> Tensor:
        flat = slice(rows.start * num_q, rows.stop * num_q)
        # for the whole batch, use the tensors that all layers of a step share
        is_whole = rows.stop == num_rows
        own_table, own_lens = (table, lens) if is_whole else (table[rows], lens[rows])
        angles, where = (cos[flat], sin[flat]), (cache.to(kind), own_table)
        ups = kernels.pack(up_k.to(kind)), kernels.pack(up_v.to(kind))
        how = AttentionMetadata(*angles, True, *where, c.softmax_scale)
        return kernels.mla_attend(q[flat].to(kind), *ups, how, own_lens)

    wanted = attend(TORCH_KERNELS, slice(0, 1), torch.float64)
    wrong = error(attend(kernels, slice(0, num_rows), BF16)[:num_q], wanted)
    work = floors.attention(c, num_rows, num_q, context)
    work += floors.product(up_k.numel() + up_v.numel(), num_rows * num_q)
    what = f"{name}, attention, {num_rows} rows x {num_q} of {context}"
    _tell(device, say, what, lambda: attend(kernels, slice(0, num_rows), BF16), work, wrong)


def _prompt(
    device: Device, say: Say, name: str, config: ModelConfig, kernels: Kernels, num_tokens: int
) -> None:
    """Measure causal attention over expanded keys and values, and torch's time for it."""
    c, num_pages = config, -(-num_tokens // PAGE_SIZE)
    heads, width = c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim
    cache = draw(device, 1 + num_pages, PAGE_SIZE, c.latent_dim)
    pages = torch.arange(1, 1 + num_pages, device=device.kind)[None]
    q = draw(device, num_tokens, heads, c.qk_head_dim)
    kv_b = draw(device, heads, width, c.kv_lora_rank, scale=c.kv_lora_rank**-0.5)
    angle = torch.rand(num_tokens, c.qk_rope_head_dim // 2, device=device.kind)
    ends, angles = torch.tensor([num_tokens]), (angle.cos(), angle.sin())
    segments = Segments((num_tokens,), (num_tokens,), ends)

    def attend(kernels: Kernels, num_heads: int, kind: torch.dtype) -> Tensor:
        own_q, up = q[:, :num_heads].to(kind), kernels.pack(kv_b[:num_heads].to(kind))
        how = AttentionMetadata(*angles, True, cache.to(kind), pages, c.softmax_scale)
        return kernels.mla_prefill(own_q, up, how, segments, c.v_head_dim)

    wrong = error(attend(kernels, heads, BF16)[:, :1], attend(TORCH_KERNELS, 1, torch.float64))
    pairs = num_tokens * (num_tokens + 1) / 2
    work = Work(0, 2 * heads * (c.qk_head_dim + c.v_head_dim) * pairs)
    work += floors.product(kv_b.numel(), num_tokens)
    torchs = 1e6 * device.cold_s(lambda: attend(TORCH_KERNELS, heads, BF16))
    what = f"{name}, attention of a prompt of {num_tokens}, torch's {torchs:.0f} us"
    _tell(device, say, what, lambda: attend(kernels, heads, BF16), work, wrong)


def _experts(
    device: Device, say: Say, name: str, config: ModelConfig, kernels: Kernels, num_tokens: int
) -> None:
    c, num_slots = config, config.n_routed_experts
    dim, width = c.hidden_size, c.moe_intermediate_size
    x = draw(device, num_tokens, dim)
    chosen = torch.rand(num_tokens, num_slots, device=device.kind).topk(c.num_experts_per_tok)
    slots = chosen.indices.flatten()
    some = [0, len(slots) // 2, len(slots) - 1]
    made = torch.Generator(device.kind).manual_seed(1)
    for kind, item_bytes in (("bf16", 2), ("FP8", 1))[: 1 + kernels.supports_fp8_blocks]:
        given: Any = tuple(
            random_blocks(num_slots, *shape, made)
            if kind == "FP8"
            else draw(device, num_slots, shape[0] * shape[1], shape[2], scale=0.02)
            for shape in ((2, width, dim), (1, dim, width))
        )
        packed = kernels.pack_experts(*given)
        run = partial(kernels.fused_experts, x, None, slots, *packed)
        of = [(x[i // c.num_experts_per_tok], int(slots[i])) for i in some]
        wanted = torch.stack([_one(x_D, slot, *given) for x_D, slot in of])
        num_weights = 3 * dim * width
        work = Work(item_bytes * num_weights * len(slots.unique()), 2 * num_weights * len(slots))
        what = f"{name}, {kind} experts, {num_tokens} tokens"
        _tell(device, say, what, run, work, error(run()[some], wanted))


def dense_fp8(
    device: Device,
    say: Say,
    name: str,
    config: ModelConfig,
    forms: Sequence[tuple[str, Kernels]],
    num_tokens: int,
) -> None:
    """Measure the output projection, with bf16 rows, and with FP8 rows as in prefill."""
    from tandem.model.kernels.gpu.products import quantise

    width, num_out = config.num_attention_heads * config.v_head_dim, config.hidden_size
    made = torch.Generator(device.kind).manual_seed(1)
    blocks = random_blocks(1, 1, num_out, width, made)
    packed, x = Fp8BlockWeight(blocks.values[0], blocks.scales[0]), draw(device, num_tokens, width)
    matrix = dense(blocks, 1, 0)
    values, scales = quantise(x, power_of_2_scales=False)
    in_fp8 = values.double() * scales.double().repeat_interleave(BLOCK, 1)[:, :width]
    for how, own in forms:
        rows = in_fp8 if how == "by FP8 rows" else x.double()
        run = partial(own.linear, x, packed, num_out)
        work = Work(num_out * width, 2 * num_out * width * num_tokens)
        what = f"{name}, FP8 product {how}, {num_tokens} tokens"
        _tell(device, say, what, run, work, error(run(), rows @ matrix.T))


def _one(x_D: Tensor, slot: int, w1: Weights, w2: Weights) -> Tensor:
    """Compute one expert in fp64."""
    up, down = (
        dense(one, num_parts, slot) if isinstance(one, Fp8BlockWeight) else one[slot].double()
        for one, num_parts in ((w1, 2), (w2, 1))
    )
    gate, up = (up @ x_D.double()).chunk(2)
    return down @ (torch.nn.functional.silu(gate) * up)


def _routing(
    device: Device, say: Say, name: str, config: ModelConfig, kernels: Kernels, num_tokens: int
) -> None:
    x = draw(device, num_tokens, config.hidden_size)
    weight = draw(device, config.n_routed_experts, config.hidden_size, scale=0.05)
    bias = torch.rand(config.n_routed_experts, device=device.kind) * 0.1
    options = bias if config.topk_method == "noaux_tc" else None, routing_of(config)
    packed = kernels.pack(weight)
    ids, weights = kernels.route(x, packed, *options)
    wanted_ids, wanted = TORCH_KERNELS.route(x.double(), weight.double(), *options)
    same = float((ids == wanted_ids).float().mean())
    work = floors.product(weight.numel(), num_tokens)
    what = f"{name}, routing, {num_tokens} tokens, {same:.4f} chosen alike"
    took = lambda: kernels.route(x, packed, *options)  # noqa: E731
    _tell(device, say, what, took, work, error(weights, wanted))


def _rows(
    device: Device, say: Say, name: str, config: ModelConfig, kernels: Kernels, num_tokens: int
) -> None:
    """Measure the row kernels after attention and after experts, which also sum experts'
    outputs."""
    x, one = (draw(device, num_tokens, config.hidden_size) for _ in range(2))
    weight, num_chosen = draw(device, config.hidden_size), config.num_experts_per_tok
    out = draw(device, num_tokens, num_chosen, config.hidden_size)
    given = out, torch.rand(num_tokens, num_chosen, device=device.kind), one
    summed = TORCH_KERNELS.combine(out.double(), *given[1:]).to(BF16)

    def after_attention() -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, one, weight, 1e-6)

    def after_experts() -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, kernels.combine(*given), weight, 1e-6)

    runs = ("sum", after_attention, one, 2), ("experts", after_experts, summed, 2 + num_chosen)
    for what, run, added, num_read in runs:
        total = (x + added).double()
        wanted = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        work = Work((2 + num_read) * 2 * x.numel(), 0)
        title = f"{name}, {what} and norm, {num_tokens} rows"
        _tell(device, say, title, run, work, error(run()[1], wanted))


def _sampling(
    device: Device, say: Say, name: str, config: ModelConfig, kernels: Kernels, num_rows: int
) -> None:
    """Measure sampling. The error is the share of tokens that differ from torch's."""
    logits = 3 * torch.randn(num_rows, 1, config.vocab_size, device=device.kind)
    indices = torch.arange(num_rows, device=device.kind).unsqueeze(1)
    for top_p in (1.0, 0.95):
        settings = [SamplingParams(temperature=1.0, top_p=top_p, seed=i) for i in range(num_rows)]
        rows = SamplingRows.of(settings, device.kind)
        run = partial(kernels.sample_tokens, logits, rows, indices)
        wrong = float((run() != TORCH_KERNELS.sample_tokens(logits, rows, indices)).float().mean())
        work = Work(4 * logits.numel(), 0)
        _tell(device, say, f"{name}, sampling, top-p {top_p}, {num_rows} rows", run, work, wrong)
