"""From errors to gRPC statuses: the one place where that is decided."""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from cluster.proto.wire import RETRY_AFTER_KEY
from core.errors import (
    Draining,
    HandoverError,
    NodeLost,
    Overloaded,
    Poisonous,
    Preempted,
    StepFailed,
    is_out_of_resources,
)

_MAX_DETAILS = 2000
_RETRY_AFTER_S = 1.0
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
            return _exhausted(details, error.retry_after_s)
        case Poisonous():
            return RpcStatus(grpc.StatusCode.INTERNAL, details)
        case Draining() | NodeLost() | HandoverError() | Preempted() | StepFailed():
            return RpcStatus(grpc.StatusCode.UNAVAILABLE, details)
        case ValueError():
            return RpcStatus(grpc.StatusCode.INVALID_ARGUMENT, details)
        case TimeoutError():
            return RpcStatus(grpc.StatusCode.DEADLINE_EXCEEDED, details)
        case asyncio.CancelledError():
            return RpcStatus(grpc.StatusCode.CANCELLED, details)
        case _ if is_out_of_resources(error):
            _log.error("this process is out of resources: %r", error)
            return _exhausted(details, _RETRY_AFTER_S)
    _log.error("unexpected error", exc_info=error)
    return RpcStatus(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {details}")


def _exhausted(details: str, retry_after_s: float) -> RpcStatus:
    metadata = ((RETRY_AFTER_KEY, f"{retry_after_s:g}"),)
    return RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, details, metadata)
