"""Named errors that cross node borders. ``ValueError`` is the user's mistake throughout."""

import errno

_OUT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EAGAIN}


class TandemError(Exception):
    """A failure of one request or node that the caller may act upon."""


class Overloaded(TandemError):
    """No room now; worth another try after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(TandemError):
    """The server is shutting down and admits nothing new."""


class Preempted(TandemError):
    """A decode rank gave the sequence up for others; it goes on from what it has emitted."""


class NodeLost(TandemError):
    """A node died or lost its epoch while it held state of this request. ``node`` is its name
    where that is known; it does not cross processes."""

    node: str | None = None


class RankDied(NodeLost):
    """Its process has ended; the controller will tell whether a step was the cause."""


class EpochEnded(NodeLost):
    """A rank of the gang was lost or left: those that remain go on in the gang's next life."""


class ProgramFailed(EpochEnded):
    """A rank's own part of a step that all ranks share raised, which ended the epoch."""


class StepFailed(TandemError):
    """A step that this request was in failed; it goes on, at first in steps of its own."""


class Poisonous(StepFailed):
    """A step failed that this request, suspected already, was alone in: it is not tried again."""


class HandoverError(TandemError):
    """A KV hand-over could not be completed; nothing of it may be used."""


class LayoutMismatch(HandoverError):
    """Prefill and decode node do not cache the same thing the same way."""


class StalePages(HandoverError):
    """Pages changed hands while a transfer still named them."""


class CannotCapture(RuntimeError):
    """A function cannot be had as a graph of the device, which goes on answering."""


def is_out_of_resources(error: BaseException) -> bool:
    """Whether a process has no memory, threads, open files or disk left; all may come back."""
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    no_file = isinstance(error, OSError) and error.errno in _OUT_OF
    return no_thread or no_file or isinstance(error, MemoryError)
