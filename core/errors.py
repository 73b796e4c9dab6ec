"""Named errors that cross processes. ``ValueError`` always means a mistake of the user."""

import errno
from typing import Self

_RESOURCE_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EAGAIN}
_RESOURCE_TEXTS = (
    "can't start new thread",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)
"""Parts of messages of RuntimeErrors which mean that a resource is exhausted.

CPython has one for threads. torch has several for the allocators of CPU, CUDA and NCCL.
"""


class TandemError(Exception):
    """Failure of one request or rank to which the caller may react."""


class Overloaded(TandemError):
    """A lack of capacity. The call may be retried after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(TandemError):
    """A temporary failure of one rank or server. Another one, or a later retry, may succeed."""


class Draining(Unavailable):
    """The server is shutting down and admits no new requests."""


class Preempted(Unavailable):
    """A decode rank preempted the sequence, which can resume from its emitted tokens."""


class RankLost(Unavailable):
    """A rank died, or its epoch ended, while it held state of this request.

    ``rank`` is the rank's name (``RankSpec.epoch_name``), None if unknown. It is not sent to other
    processes.
    """

    rank: str | None = None


class RankDied(RankLost):
    """The rank's process has ended. The controller later reports whether a step was the cause."""


class EpochEnded(RankLost):
    """A rank of the gang was lost or left. The remaining ranks continue in the next epoch."""


class ProgramFailed(EpochEnded):
    """An exception in a rank's own part of a step that its gang shares.

    It ended the epoch.
    """


class StepFailed(Unavailable):
    """A step that included this request failed. It is retried, at first in steps of its own."""


class PoisonRequest(StepFailed):
    """A request failed in a step of its own after it was suspected of an earlier failure.

    It is not retried.
    """


class NonFiniteLogits(TandemError):
    """The model's logits for this request are not finite, so no token can be chosen.

    The request is not retried, because another rank would compute the same logits.
    """

    @classmethod
    def of(cls, identity: object, num_tokens: int) -> Self:
        """Create the error, whose message has the reason ``non_finite`` and the position.

        ``num_tokens`` counts the tokens of prompt and answer before that position.
        """
        return cls(
            f"non_finite: {identity}: after {num_tokens} tokens no logit is a finite number: the "
            "checkpoint or the memory of a rank is damaged, or the request forbids every token"
        )


class HandoverError(Unavailable):
    """A KV hand-over could not be completed. None of its data may be used."""


class ModelMismatch(TandemError):
    """The answer was started by another model than the one that is to continue it."""


class SequenceEnded(HandoverError):
    """The prefill rank has dropped the sequence or never had it. The connection itself works."""


class LayoutMismatch(HandoverError):
    """Prefill and decode rank have different cache layouts."""


class StalePages(HandoverError):
    """Pages changed owners while a transfer still referred to them."""


class TextTooLong(ValueError):
    """A text of ``num_tokens`` tokens exceeds the allowed number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the text is too long: it has {num_tokens} tokens")
        self.num_tokens = num_tokens


class CaptureError(RuntimeError):
    """A function cannot be captured as a device graph. The device still works."""


def is_out_of_resources(error: BaseException) -> bool:
    """Return whether ``error`` means that a resource of the process or device is exhausted.

    The resources are memory, threads, open files and disk space. All may become available again.
    """
    if isinstance(error, OSError):
        return error.errno in _RESOURCE_ERRNOS
    if isinstance(error, RuntimeError):
        return any(text in str(error) for text in _RESOURCE_TEXTS)
    return isinstance(error, MemoryError)
