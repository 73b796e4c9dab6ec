"""From errors to gRPC statuses: the one place where that is decided."""

import asyncio
import errno
import logging
from dataclasses import dataclass

import grpc

from cluster.proto.wire import RETRY_AFTER_KEY
from core.errors import Draining, HandoverError, NodeLost, Overloaded, Preempted

_MAX_DETAILS = 2000
_RETRY_AFTER_S = 1.0
_OUT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EAGAIN}
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
        case Draining() | NodeLost() | HandoverError() | Preempted():
            return RpcStatus(grpc.StatusCode.UNAVAILABLE, details)
        case ValueError():
            return RpcStatus(grpc.StatusCode.INVALID_ARGUMENT, details)
        case TimeoutError():
            return RpcStatus(grpc.StatusCode.DEADLINE_EXCEEDED, details)
        case asyncio.CancelledError():
            return RpcStatus(grpc.StatusCode.CANCELLED, details)
        case _ if _is_out_of_resources(error):
            _log.error("this process is out of resources: %r", error)
            return _exhausted(details, _RETRY_AFTER_S)
    _log.error("unexpected error", exc_info=error)
    return RpcStatus(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {details}")


def _exhausted(details: str, retry_after_s: float) -> RpcStatus:
    metadata = ((RETRY_AFTER_KEY, f"{retry_after_s:g}"),)
    return RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, details, metadata)


def _is_out_of_resources(error: BaseException) -> bool:
    """Of memory, threads, open files or disk, all of which may come back."""
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    no_file = isinstance(error, OSError) and error.errno in _OUT_OF
    return no_thread or no_file or isinstance(error, MemoryError)
