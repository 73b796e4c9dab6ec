"""Interface of tensor functions that are called repeatedly: eager, recorded or captured."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
"""Function of tensors whose control flow depends only on their shapes. It may change other tensors
in place."""


class ReplayableFunction(Protocol):
    """A function that is called repeatedly. Calls are slower until it ``is_ready``."""

    @property
    def is_ready(self) -> bool: ...

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]: ...

    def forget(self) -> None:
        """Release the graph and tensors of earlier calls, even if this object stays referenced."""


class Eager:
    is_ready = True

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._function(*inputs)

    def forget(self) -> None:
        return
