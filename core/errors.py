"""Named errors that cross processes. ``ValueError`` is the user's mistake throughout."""

import errno
from typing import Self

_RESOURCE_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EAGAIN}
_RESOURCE_TEXTS = (
    "can't start new thread",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)
"""Parts of the messages of RuntimeErrors that mean the same: CPython's for threads, torch's for
allocators of the CPU, of CUDA and of NCCL."""


class TandemError(Exception):
    """A failure of one request or rank that the caller may act upon."""


class Overloaded(TandemError):
    """No room now; worth another try after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(TandemError):
    """It does not work here, or not now: it may go on elsewhere, or later."""


class Draining(Unavailable):
    """The server is shutting down and admits nothing new."""


class Preempted(Unavailable):
    """A decode rank gave the sequence up for others; it goes on from what it has emitted."""


class RankLost(Unavailable):
    """A rank died or lost its epoch while it held state of this request. ``rank`` is the
    life that was meant, where that is known; it does not cross processes."""

    rank: str | None = None


class RankDied(RankLost):
    """Its process has ended; the controller will tell whether a step was the cause."""


class EpochEnded(RankLost):
    """A rank of the gang was lost or left: those that remain go on in the gang's next life."""


class ProgramFailed(EpochEnded):
    """A rank's own part of a step that all ranks share raised, which ended the epoch."""


class StepFailed(Unavailable):
    """A step that this request was in failed; it goes on, at first in steps of its own."""


class PoisonRequest(StepFailed):
    """A step failed that this request, suspected already, was alone in: it is not tried again."""


class NonFiniteLogits(TandemError):
    """The model's logits for this request are not finite numbers, so no token can be chosen. It is
    not tried again: another rank would compute the same."""

    @classmethod
    def of(cls, identity: object, num_tokens: int) -> Self:
        """Name the reason, ``non_finite``, and the place: after ``num_tokens`` of prompt and
        answer."""
        return cls(
            f"non_finite: {identity}: after {num_tokens} tokens no logit is a finite number: the "
            "checkpoint or the memory of a rank is damaged, or the request forbids every token"
        )


class HandoverError(Unavailable):
    """A KV hand-over could not be completed; nothing of it may be used."""


class ModelMismatch(TandemError):
    """An answer was begun by another model than the one that is to continue it."""


class SequenceEnded(HandoverError):
    """Prefill has given the sequence up, or does not know it; its wire is well."""


class LayoutMismatch(HandoverError):
    """Prefill and decode rank do not cache the same thing the same way."""


class StalePages(HandoverError):
    """Pages changed hands while a transfer still named them."""


class TextTooLong(ValueError):
    """A text has more tokens than were allowed: ``num_tokens``."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens")
        self.num_tokens = num_tokens


class CaptureError(RuntimeError):
    """A function cannot be had as a graph of the device, which goes on answering."""


def is_out_of_resources(error: BaseException) -> bool:
    """Return whether a process has no memory (the host's or a device's), threads, open files or
    disk space left; all may come back."""
    if isinstance(error, OSError):
        return error.errno in _RESOURCE_ERRNOS
    if isinstance(error, RuntimeError):
        return any(text in str(error) for text in _RESOURCE_TEXTS)
    return isinstance(error, MemoryError)
