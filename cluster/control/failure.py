"""Causes of the end of an epoch: pure functions of the states and crash reports of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import Overloaded, ProgramFailed, RankLost, StepFailed
from tandem.core.membership import InFlightBatch, RankState
from tandem.core.progress import LOADING
from tandem.core.schema import Failure, to_error, to_failure

USER_ERROR = "user error"
NO_CAPACITY = "no capacity"
INTERNAL_FAULT = "internal fault"
EXTERNAL = "external"
"""Categories of causes.

USER_ERROR: a mistake in the configuration. NO_CAPACITY: Ray has no capacity for the gang.
INTERNAL_FAULT: an error of the ranks themselves. EXTERNAL: all else, such as a SIGKILL, a lost
machine or silence.
"""
CREATION_FAILURE_TEXT = "creation task"
"""Part of Ray's message about an actor whose constructor failed."""
FATAL_SIGNAL_TEXT = "Fatal Python error"
"""Start of faulthandler's report of a signal that a step may raise: SEGV, ABRT, BUS, FPE, ILL."""
MAX_REPORTED_LOG_BYTES = 2000


@dataclass(frozen=True, slots=True)
class CrashReport:
    """Traces of a dead rank: the end of its log, and the sequences of the step that it ran."""

    log: str = ""
    in_flight: InFlightBatch | None = None


@dataclass(frozen=True, slots=True)
class EpochFailure:
    """End of an epoch.

    Attributes:
        error: The cause.
        survivors: Numbers of the ranks whose processes are intact.
        reports: Crash reports of the ranks that died or caused the end.
    """

    error: Exception
    survivors: frozenset[int] = frozenset()
    reports: tuple[CrashReport, ...] = ()

    @property
    def category(self) -> str:
        """Category of the cause: USER_ERROR, NO_CAPACITY, INTERNAL_FAULT or EXTERNAL.

        It determines whether and when the gang is restarted (cluster/control/restart_policy.py).
        """
        if isinstance(self.error, ValueError):
            return USER_ERROR
        if isinstance(self.error, Overloaded):
            return NO_CAPACITY
        is_lost = isinstance(self.error, RankLost | TimeoutError)
        is_fatal = CREATION_FAILURE_TEXT in str(self.error) or any(
            FATAL_SIGNAL_TEXT in report.log for report in self.reports
        )
        return INTERNAL_FAULT if is_fatal or not is_lost or self._is_step else EXTERNAL

    @property
    def failure(self) -> Failure:
        """Failure for users: the error, and the ends of the logs if they can explain it."""
        failure = to_failure(self.error)
        if self.category in (USER_ERROR, NO_CAPACITY):
            return failure
        tails = [
            f"\n{report.log[-MAX_REPORTED_LOG_BYTES:].strip()}"
            for report in self.reports
            if report.log
        ]
        return replace(failure, text="".join([failure.text, *tails]))

    @property
    def in_flight(self) -> InFlightBatch | None:
        """Sequences of the step that ended the epoch; None if the cause was not a step.

        A killed process, a lost machine and silence never count as caused by a step.
        """
        for report in self.reports:
            if report.in_flight is not None and (self._is_step or FATAL_SIGNAL_TEXT in report.log):
                return report.in_flight
        return None

    @property
    def _is_step(self) -> bool:
        return isinstance(self.error, StepFailed | ProgramFailed)


class EpochOver(Exception):
    """End of an epoch because of ``cause``. The processes of ``lost_ranks`` must be killed."""

    def __init__(self, cause: Exception, *lost_ranks: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.lost_ranks = frozenset(lost_ranks)


def check_states(states: Sequence[RankState]) -> None:
    """Raise EpochOver if the gang cannot continue according to the states of its ranks."""
    for state in states:
        if state.failure is not None:
            raise EpochOver(to_error(state.failure), state.spec.rank)
    ends = [state.epoch_end_cause for state in states if state.epoch_end_cause is not None]
    if ends:
        # The rank that ended the epoch knows more than the ranks that only noticed its end.
        raise EpochOver(
            to_error(min(ends, key=lambda failure: failure.kind != ProgramFailed.__name__))
        )
    stuck = [
        state.engine_progress
        for state in states
        if state.engine_progress is not None and state.engine_progress.is_stalled
    ]
    if stuck:
        late = laggard(states)
        text = f"{late.spec.epoch_name}: the engine has been {stuck[0]}"
        if len(states) > 1 and late.engine_progress is not None:
            position = late.engine_progress.position
            text = (
                f"{late.spec.epoch_name} keeps its gang waiting at {position}: "
                f"a rank has been {stuck[0]}"
            )
        raise EpochOver(RankLost(text), late.spec.rank)


def is_starting(state: RankState | None) -> bool:
    """Return whether a rank is expected to make startup progress without waiting for others.

    ``state`` is its latest state; None if it has reported none. A rank that is ready, or that waits
    for its gang or for the cluster's weights, is not expected to.
    """
    return state is None or (
        not (state.info or state.wait_reason) and state.is_loaded == state.is_joined
    )


def describe_activity(state: RankState | None) -> str:
    """Return the current activity of a rank that is not ready."""
    if state is None:
        return "starting its process"
    if state.is_joined or state.is_loaded:
        return "joining its gang" if state.is_joined else "waiting for its gang"
    return state.wait_reason or (
        f"{state.activity}, {state.progress:.0%}" if state.activity == LOADING else state.activity
    )


def laggard(states: Sequence[RankState]) -> RankState:
    """Return the rank that is least advanced in lockstep, for which the others wait.

    A stalled rank takes precedence over an idle one at the same position.
    """
    known = [
        (state.engine_progress, state) for state in states if state.engine_progress is not None
    ]
    return min(known, key=lambda candidate: (candidate[0].position, not candidate[0].is_stalled))[1]


def has_failed(state: RankState) -> bool:
    """Return whether an error in the rank's own part of a step ended the epoch."""
    return (
        state.epoch_end_cause is not None and state.epoch_end_cause.kind == ProgramFailed.__name__
    )
