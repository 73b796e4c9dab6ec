"""Functions of tensors that are called again and again, in whatever form a device has them."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
"""Of tensors, on a way that depends on nothing but their shapes; others it may change in place."""


class ReplayableFunction(Protocol):
    """A Function that is called again and again. Before it ``is_ready``, calls take longer."""

    @property
    def is_ready(self) -> bool: ...

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]: ...

    def forget(self) -> None:
        """Let go of what was kept of earlier calls, whoever still holds this."""


class Eager:
    is_ready = True

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._function(*inputs)

    def forget(self) -> None:
        return
