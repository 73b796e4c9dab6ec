"""Conversion of errors to gRPC statuses."""

import asyncio
import logging
from typing import NamedTuple

import grpc

from tandem.cluster.proto.grpc_settings import RETRY_AFTER_KEY
from tandem.core import errors

_MAX_DETAILS = 2000
_log = logging.getLogger(__name__)


class RpcStatus(NamedTuple):
    """Status with which a failed call ends."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: BaseException) -> RpcStatus:
    """Return the gRPC status for ``error``. Unexpected errors are also logged."""
    details = (str(error) or type(error).__name__)[:_MAX_DETAILS]
    if errors.is_out_of_resources(error):
        _log.error("this process is out of resources: %r", error)
        error = errors.Overloaded(details)
    match error:
        case errors.Overloaded():
            hint = ((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"),)
            return RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, details, hint)
        case errors.ModelMismatch():
            return RpcStatus(grpc.StatusCode.FAILED_PRECONDITION, details)
        case errors.PoisonRequest() | errors.NonFiniteLogits():
            return RpcStatus(grpc.StatusCode.INTERNAL, details)
        case errors.Unavailable():
            return RpcStatus(grpc.StatusCode.UNAVAILABLE, details)
        case ValueError():
            return RpcStatus(grpc.StatusCode.INVALID_ARGUMENT, details)
        case TimeoutError():
            return RpcStatus(grpc.StatusCode.DEADLINE_EXCEEDED, details)
        case asyncio.CancelledError():
            return RpcStatus(grpc.StatusCode.CANCELLED, details)
    _log.error("unexpected error", exc_info=error)
    return RpcStatus(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {details}")
