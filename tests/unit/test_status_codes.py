"""The gRPC status that a client gets for each error."""

import errno
import logging

import grpc
import pytest

from tandem.cluster.entrypoints.status_codes import status_of
from tandem.cluster.proto.grpc_settings import RETRY_AFTER_KEY
from tandem.core.errors import (
    Draining,
    HandoverError,
    LayoutMismatch,
    ModelMismatch,
    NonFiniteLogits,
    Overloaded,
    PoisonRequest,
    Preempted,
    RankLost,
    StalePages,
    StepFailed,
)
from tandem.core.schema import to_error, to_failure


def test_what_is_not_finite_says_so_wherever_it_was_raised() -> None:
    """NonFiniteLogits keeps its status wherever it was raised. The client must not retry the
    request, and the log holds no traceback."""
    error = to_error(to_failure(NonFiniteLogits.of("r1", 7)))
    assert isinstance(error, NonFiniteLogits)
    status = status_of(error)
    assert status.code == grpc.StatusCode.INTERNAL
    assert status.details.startswith("non_finite: r1: after 7 tokens")


def test_poison_is_not_to_be_sent_again() -> None:
    assert status_of(PoisonRequest("alone")).code == grpc.StatusCode.INTERNAL


def test_what_no_other_try_helps_is_a_failed_precondition() -> None:
    assert status_of(ModelMismatch("another")).code == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "error", [RankLost, Draining, HandoverError, LayoutMismatch, StalePages, Preempted, StepFailed]
)
def test_what_can_be_resumed_elsewhere_is_unavailable(error: type[Exception]) -> None:
    status = status_of(error("why"))
    assert (status.code, status.details) == (grpc.StatusCode.UNAVAILABLE, "why")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (Overloaded("full", 2.5), "2.5"),
        (MemoryError(), "1"),
        (RuntimeError("can't start new thread"), "1"),
        *(
            (OSError(getattr(errno, name), name), "1")
            for name in ("EMFILE", "ENFILE", "ENOSPC", "ENOMEM", "EAGAIN")
        ),
    ],
)
def test_what_may_have_room_again_is_exhausted_with_a_hint(error: Exception, hint: str) -> None:
    status = status_of(error)
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.trailing_metadata == ((RETRY_AFTER_KEY, hint),)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "disk"), RuntimeError("no"), KeyError("k")])
def test_what_nobody_expected_is_internal_and_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        status = status_of(error)
    assert status.code == grpc.StatusCode.INTERNAL
    assert status.details.startswith(type(error).__name__)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


def test_a_timeout_is_no_lack_of_resources() -> None:
    assert status_of(TimeoutError("slow")).code == grpc.StatusCode.DEADLINE_EXCEEDED
