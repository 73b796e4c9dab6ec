"""Who or what ended a gang's life: pure decisions over what its ranks said and left."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import Overloaded, ProgramFailed, RankLost, StepFailed
from tandem.core.membership import InFlightBatch, RankState
from tandem.core.progress import LOADING
from tandem.core.schema import Failure, to_error, to_failure

USER_ERROR, NO_CAPACITY, INTERNAL_FAULT, EXTERNAL = "mistake", "no room", "fault", "outside"
"""What ends a life: the user's config, want of room, an error of the ranks' own, all else (a
SIGKILL, a lost machine, silence)."""
CREATION_FAILURE_TEXT = "creation task"
"""Of Ray's word on an actor whose own code kept it from ever being there."""
FATAL_SIGNAL_TEXT = "Fatal Python error"
"""How faulthandler begins to tell of a signal that a step may raise: SEGV, ABRT, BUS, FPE, ILL."""
MAX_REPORTED_LOG_BYTES = 2000


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What a dead rank left: the end of its log, and who was in its step."""

    log: str = ""
    in_flight: InFlightBatch | None = None


@dataclass(frozen=True, slots=True)
class EpochFailure:
    """A life ended with ``error``: the ranks ``left`` are well, those that died of it or caused it
    have left these last ``words``."""

    error: Exception
    survivors: frozenset[int] = frozenset()
    reports: tuple[CrashReport, ...] = ()

    @property
    def category(self) -> str:
        """Who is to blame."""
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
        """What users are told: the error, and the end of each log if that can explain it."""
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
        """Who was in the step that ended it; None if it was no step that did. A killed process, a
        lost machine and silence never count (design.md, Poison)."""
        for report in self.reports:
            if report.in_flight is not None and (self._is_step or FATAL_SIGNAL_TEXT in report.log):
                return report.in_flight
        return None

    @property
    def _is_step(self) -> bool:
        return isinstance(self.error, StepFailed | ProgramFailed)


class EpochOver(Exception):
    """A life of a gang is over, because of ``cause``; the processes of ``lost`` go with it."""

    def __init__(self, cause: Exception, *lost_ranks: int) -> None:
        super().__init__(str(cause))
        self.cause, self.lost_ranks = cause, frozenset(lost_ranks)


def check_states(states: Sequence[RankState]) -> None:
    """Raises EpochOver if by what all ranks of a gang say it cannot go on."""
    for state in states:
        if state.failure is not None:
            raise EpochOver(to_error(state.failure), state.spec.rank)
    ends = [state.epoch_end_cause for state in states if state.epoch_end_cause is not None]
    if ends:
        # Those who only saw it end know less than who made it end.
        raise EpochOver(to_error(min(ends, key=lambda one: one.kind != ProgramFailed.__name__)))
    stuck = [
        state.engine_progress
        for state in states
        if state.engine_progress is not None and state.engine_progress.is_stalled
    ]
    if stuck:
        late = laggard(states)
        text = f"{late.spec.epoch_name}: its engine is {stuck[0]}"
        if len(states) > 1 and late.engine_progress is not None:
            position = late.engine_progress.position
            text = f"{late.spec.epoch_name} holds up its gang at {position}: {stuck[0]}"
        raise EpochOver(RankLost(text), late.spec.rank)


def is_starting(state: RankState | None) -> bool:
    """Whether a rank that has said this last, or nothing yet, ought to get on by itself: it is
    neither ready nor waits, for the others of its gang to load or for its cluster's weights."""
    return state is None or (
        not (state.info or state.wait_reason) and state.is_loaded == state.is_joined
    )


def describe_activity(state: RankState | None) -> str:
    """With what a rank that is not ready is busy."""
    if state is None:
        return "starting its process"
    if state.is_joined or state.is_loaded:
        return "joining its gang" if state.is_joined else "waiting for its gang"
    return state.wait_reason or (
        f"{state.activity}, {state.progress:.0%}" if state.activity == LOADING else state.activity
    )


def laggard(states: Sequence[RankState]) -> RankState:
    """Whom the others wait for, where some rank is stuck: of those least far in lockstep one that
    is stuck itself, or else one that does not even try."""
    known = [
        (state.engine_progress, state) for state in states if state.engine_progress is not None
    ]
    return min(known, key=lambda one: (one[0].position, not one[0].is_stalled))[1]


def has_failed(state: RankState) -> bool:
    """Whether its own part of a step is what ended the epoch."""
    return (
        state.epoch_end_cause is not None and state.epoch_end_cause.kind == ProgramFailed.__name__
    )
