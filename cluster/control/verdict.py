"""Who or what ended a gang's life: pure decisions over what its ranks said and left."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import Overloaded, ProgramFailed, RankLost, StepFailed
from tandem.core.membership import InStep, RankState
from tandem.core.pace import LOADING
from tandem.core.schema import Failure, error_of, failure_of

MISTAKE, NO_ROOM, FAULT, OUTSIDE = "mistake", "no room", "fault", "outside"
"""What ends a life: the user's config, want of room, an error of the ranks' own, all else (a
SIGKILL, a lost machine, silence)."""
CREATION = "creation task"
"""Of Ray's word on an actor whose own code kept it from ever being there."""
FATAL = "Fatal Python error"
"""How faulthandler begins to tell of a signal that a step may raise: SEGV, ABRT, BUS, FPE, ILL."""
TOLD_BYTES = 2000


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a dead rank left: the end of its log, and who was in its step."""

    log: str = ""
    in_step: InStep | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """A life ended with ``error``: the ranks ``left`` are well, those that died of it or caused it
    have left these last ``words``."""

    error: Exception
    left: frozenset[int] = frozenset()
    words: tuple[LastWords, ...] = ()

    @property
    def why(self) -> str:
        """Who is to blame."""
        if isinstance(self.error, ValueError):
            return MISTAKE
        if isinstance(self.error, Overloaded):
            return NO_ROOM
        is_lost = isinstance(self.error, RankLost | TimeoutError)
        is_fatal = CREATION in str(self.error) or any(FATAL in said.log for said in self.words)
        return FAULT if is_fatal or not is_lost or self._is_step else OUTSIDE

    @property
    def failure(self) -> Failure:
        """What users are told: the error, and the end of each log if that can explain it."""
        failure = failure_of(self.error)
        if self.why in (MISTAKE, NO_ROOM):
            return failure
        tails = [f"\n{said.log[-TOLD_BYTES:].strip()}" for said in self.words if said.log]
        return replace(failure, text="".join([failure.text, *tails]))

    @property
    def in_step(self) -> InStep | None:
        """Who was in the step that ended it; None if it was no step that did. A killed process, a
        lost machine and silence never count (design.md, Poison)."""
        for said in self.words:
            if said.in_step is not None and (self._is_step or FATAL in said.log):
                return said.in_step
        return None

    @property
    def _is_step(self) -> bool:
        return isinstance(self.error, StepFailed | ProgramFailed)


class LifeOver(Exception):
    """A life of a gang is over, because of ``cause``; the processes of ``lost`` go with it."""

    def __init__(self, cause: Exception, *lost: int) -> None:
        super().__init__(str(cause))
        self.cause, self.lost = cause, frozenset(lost)


def check(states: Sequence[RankState]) -> None:
    """Raises LifeOver if by what all ranks of a gang say it cannot go on."""
    for state in states:
        if state.failure is not None:
            raise LifeOver(error_of(state.failure), state.spec.rank)
    ends = [state.ended for state in states if state.ended is not None]
    if ends:
        # Those who only saw it end know less than who made it end.
        raise LifeOver(error_of(min(ends, key=lambda one: one.kind != ProgramFailed.__name__)))
    stuck = [state.pace for state in states if state.pace is not None and state.pace.is_stuck]
    if stuck:
        late = laggard(states)
        text = f"{late.spec.life}: its engine is {stuck[0]}"
        if len(states) > 1 and late.pace is not None:
            text = f"{late.spec.life} holds up its gang at {late.pace.place}: {stuck[0]}"
        raise LifeOver(RankLost(text), late.spec.rank)


def is_starting(state: RankState | None) -> bool:
    """Whether a rank that has said this last, or nothing yet, ought to get on by itself: it is
    neither ready nor waits, for the others of its gang to load or for its cluster's weights."""
    return state is None or (not (state.info or state.waits) and state.is_loaded == state.is_joined)


def doing(state: RankState | None) -> str:
    """With what a rank that is not ready is busy."""
    if state is None:
        return "starting its process"
    if state.is_joined or state.is_loaded:
        return "joining its gang" if state.is_joined else "waiting for its gang"
    return state.waits or (
        f"{state.doing}, {state.progress:.0%}" if state.doing == LOADING else state.doing
    )


def laggard(states: Sequence[RankState]) -> RankState:
    """Whom the others wait for, where some rank is stuck: of those least far in lockstep one that
    is stuck itself, or else one that does not even try."""
    known = [(state.pace, state) for state in states if state.pace is not None]
    return min(known, key=lambda one: (one[0].place, not one[0].is_stuck))[1]


def has_failed(state: RankState) -> bool:
    """Whether its own part of a step is what ended the epoch."""
    return state.ended is not None and state.ended.kind == ProgramFailed.__name__
