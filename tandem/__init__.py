"""What users import: clients of a Tandem server. Needs neither torch nor Ray."""

from cluster.client.client import AsyncClient, Client
from cluster.client.options import GenerateOptions
from cluster.client.stream import Completion, InferenceError
from core.answer import Delta, Finished

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Delta",
    "Finished",
    "GenerateOptions",
    "InferenceError",
]
