"""From errors to gRPC statuses: the one place where that is decided."""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from cluster.proto.wire import RETRY_AFTER_KEY
from core.errors import Draining, NodeLost, Overloaded

_MAX_DETAILS = 2000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """What a failed call ends with."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: BaseException) -> RpcStatus:
    """The status that tells a client of ``error``; an unexpected one is logged as well."""
    details = (str(error) or type(error).__name__)[:_MAX_DETAILS]
    match error:
        case Overloaded():
            metadata = ((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"),)
            return RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, details, metadata)
        case Draining() | NodeLost():
            return RpcStatus(grpc.StatusCode.UNAVAILABLE, details)
        case ValueError():
            return RpcStatus(grpc.StatusCode.INVALID_ARGUMENT, details)
        case TimeoutError():
            return RpcStatus(grpc.StatusCode.DEADLINE_EXCEEDED, details)
        case asyncio.CancelledError():
            return RpcStatus(grpc.StatusCode.CANCELLED, details)
    _log.error("unexpected error", exc_info=error)
    return RpcStatus(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {details}")
