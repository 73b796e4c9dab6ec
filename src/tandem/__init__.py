"""Python client of a Tandem server: ``from tandem import Client``.

Importing the client requires neither PyTorch nor Ray. The public names are imported lazily, because
every module of Tandem imports this package and ranks do not need gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.cluster.client.client import AsyncClient, Client
    from tandem.cluster.client.options import GenerateOptions
    from tandem.cluster.client.stream import Completion, InferenceError
    from tandem.core.answer import Delta, Finished

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Delta",
    "Finished",
    "GenerateOptions",
    "InferenceError",
]
_MODULES = {
    "AsyncClient": "cluster.client.client",
    "Client": "cluster.client.client",
    "Completion": "cluster.client.stream",
    "Delta": "core.answer",
    "Finished": "core.answer",
    "GenerateOptions": "cluster.client.options",
    "InferenceError": "cluster.client.stream",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
