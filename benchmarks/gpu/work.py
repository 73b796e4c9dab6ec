"""Bytes and multiplications that a launch requires.

An input counts each time the programs read it from memory or the last-level cache. For routed
experts it is the expected number of hit experts if tokens choose uniformly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.floors import Work
from benchmarks.gpu.launches import Launch


@dataclass(frozen=True)
class Step:
    """Properties of a step that tensors without values lack.

    Attributes:
        context: Tokens of context that each row attends to.
        num_chosen: Experts that a token chooses.
    """

    context: int
    num_chosen: int


def work_of(launch: Launch, step: Step) -> Work:
    if launch.kernel is None:
        return _operator(launch)
    special = KERNELS.get(launch.name)
    return Work(_nbytes(launch.given), 0) if special is None else special(launch, step)


def hit(num_experts: int, num_tokens: float, num_chosen: int) -> float:
    """Return the expected number of distinct experts that ``num_tokens`` tokens choose."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


def _size(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies; an axis of stride 0 counts as one."""
    told = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in told if stride) * tensor.element_size()


def _nbytes(given: Any) -> int:
    """Return the bytes of all tensors, each counted once."""
    tensors = {id(one): one for one in tree_leaves(given) if isinstance(one, Tensor)}
    return sum(map(_size, tensors.values()))


def _operator(launch: Launch) -> Work:
    out_bytes = sum(map(_size, launch.out))
    if launch.name in ("linear", "mm", "bmm"):
        inner = launch.given["0"].shape[-1]
        return Work(_nbytes([launch.given, launch.out]), 2 * launch.out[0].numel() * inner)
    if launch.name in ("index", "index_select", "gather", "embedding"):
        return Work(2 * out_bytes, 0)
    if launch.name.startswith(("index_copy", "index_put", "scatter")):
        return Work(
            2 * _nbytes([value for place, value in launch.given.items() if place != "0"]), 0
        )
    return Work(_nbytes([launch.given, launch.out]), 0)


def _attend(launch: Launch, step: Step) -> Work:
    q, part, cache = (launch.given[name] for name in ("q", "part", "cache"))
    num_blocks, num_seqs, _ = _grid(launch)
    num_read = num_seqs * num_blocks * step.context * cache.shape[-1] * cache.element_size()
    width, num_pe = q.shape[2], cache.shape[-1] - q.shape[2]
    flops = 2 * q.shape[0] * q.shape[1] * step.context * (2 * width + num_pe)
    return Work(num_read + _size(q) + _written(part, step), flops)


def _merge(launch: Launch, step: Step) -> Work:
    if "part" not in launch.given:  # tokens are merged, not parts of attention (sample.py)
        return Work(_nbytes(launch.given), 0)
    return Work(_written(launch.given["part"], step) + _size(launch.given["out"]), 0)


def _written(part: Tensor, step: Step) -> float:
    """Return the bytes of the parts that have slots, each of at least 64 (attend.py)."""
    num_parts = part.shape[2]
    return _size(part) * min(1, step.context / 64 / num_parts)


def _entry(launch: Launch, step: Step) -> Work:
    kv = launch.given["kv"]
    return Work(2 * _size(kv), 0)


def _experts(launch: Launch, step: Step) -> Work:
    """Return the work of either product of routed experts, over (token, expert) pairs."""
    given, num_pairs = launch.given, launch.given["num_pairs"]
    w = given["w"]
    num_hit = hit(len(w), num_pairs / step.num_chosen, step.num_chosen)
    rows = [value for name, value in given.items() if name not in ("w", "scales", "out", "hidden")]
    moved = num_hit * (_size(w[0]) + _scales(given, "scales"))
    moved += _nbytes([rows, *(given[name] for name in ("out", "hidden") if name in given)])
    return Work(moved, 2 * num_pairs * w[0].numel())


def _product(launch: Launch, step: Step) -> Work:
    """Return the work of one matrix, or of experts' matrices with rows sorted by expert."""
    given = launch.given
    w, x, out = given["w"], given["x"], given["out"]
    num_rows = given["num_rows"]
    is_of_experts = given["S"] > 0
    num_hit = hit(len(w), num_rows / step.num_chosen, step.num_chosen) if is_of_experts else 1
    moved = num_hit * (_size(w[0]) + _scales(given, "w_scales")) + _nbytes([x, out])
    return Work(moved, 2 * num_rows * w[0].numel())


def _scales(given: dict[str, Any], name: str) -> int:
    return _size(given[name][0]) if given["HAS_BLOCKS"] else 0


def _gate(launch: Launch, step: Step) -> Work:
    x, w = launch.given["x"], launch.given["w"]
    return Work(_nbytes(launch.given), 2 * x.numel() * len(w))


def _move(launch: Launch, step: Step) -> Work:
    like, moves = launch.given["like"], launch.given["from_BN"].numel()
    return Work(2 * moves * _grid(launch)[1] * like.shape[-1] * like.element_size(), 0)


def _grid(launch: Launch) -> tuple[int, ...]:
    assert launch.grid is not None, "a kernel of ours has one"
    return launch.grid


KERNELS: dict[str, Callable[[Launch, Step], Work]] = {
    "_attend": _attend,
    "_merge": _merge,
    "_entry": _entry,
    "_gate_up": _experts,
    "_down": _experts,
    "_product": _product,
    "_logits": _gate,
    "_move": _move,
}
"""Kernels that do not read all their inputs exactly once."""
