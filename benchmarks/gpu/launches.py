"""Record the GPU launches of a function without a GPU.

Our kernels are not run, and torch's operators work on tensors that only have shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from tandem.model.kernels.gpu.kernels import TritonKernels

NUM_PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200."""
FREE = ("empty", "new_empty", "empty_like", "detach", "_unsafe_view", "lift_fresh", "alias")
"""Operators that launch nothing, besides those that return views."""


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel of ours, or of an operator of torch.

    Attributes:
        given: Arguments and options by name; arguments of an operator by position.
        out: Results of an operator.
        grid: Grid of a kernel of ours.
        is_beside: Whether it is in a branch of the graph that runs in parallel with others.
    """

    name: str
    given: dict[str, Any]
    out: tuple[Tensor, ...]
    grid: tuple[int, ...] | None
    kernel: JITFunction[Any] | None
    is_beside: bool


class Noted(TritonKernels):
    """Kernels for a GPU with NUM_PROCESSORS that record which work runs in parallel."""

    def __init__(self, quantises: bool = False) -> None:
        super().__init__(NUM_PROCESSORS, quantises)
        self.is_beside = False

    def run_concurrently(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.is_beside = True
        result = work()
        self.is_beside = False
        return lambda: result


@contextmanager
def noted(kernels: Noted) -> Iterator[list[Launch]]:
    """Record the launches made during the block, in order."""
    found: list[Launch] = []
    run = JITFunction.run

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        sizes = grid(given) if callable(grid) else grid
        made = Launch(kernel.__name__, given, (), (*sizes,), kernel, kernels.is_beside)
        found.append(made)

    JITFunction.run = note
    try:
        with _Operators(kernels, found):
            yield found
    finally:
        JITFunction.run = run


class _Operators(TorchDispatchMode):
    def __init__(self, kernels: Noted, found: list[Launch]) -> None:
        super().__init__()
        self._kernels, self._found = kernels, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if _launches(func, out):
            given = dict(enumerate(args)) | (kwargs or {})
            told = {str(name): value for name, value in given.items()}
            tensors = tuple(one for one in tree_leaves(out) if isinstance(one, Tensor))
            name = func.overloadpacket.__name__
            made = Launch(name, told, tensors, None, None, self._kernels.is_beside)
            self._found.append(made)
        return out


def _launches(func: Any, out: Any) -> bool:
    told = func._schema.returns
    is_view = bool(told) and all(one.alias_info and not one.alias_info.is_write for one in told)
    has_any = any(isinstance(one, Tensor) and one.numel() for one in tree_leaves(out))
    return has_any and not is_view and func.overloadpacket.__name__ not in FREE
