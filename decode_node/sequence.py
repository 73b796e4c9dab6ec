"""A request's state on a decode rank."""

from collections import Counter
from dataclasses import dataclass, field

from core.answer import SpeculationCounts
from core.identity import Identity
from core.request import Request

NUM_STEPS_ALONE = 8
"""More than the tokens that a lost rank had made and not told."""


@dataclass(slots=True)
class Sequence:
    """A granted row and its pages, and from ``begin`` on the request that runs in it.

    ``num_most_pages`` is what the whole answer may need. ``num_output`` counts every token
    emitted so far, resumed ones too, as far as steps have been read. ``row`` and ``pages`` are
    owned from the grant until the sequence has ended and no step on its way (``num_in_flight``)
    may touch them. ``num_last_drafts`` are those of the step launched last, and behind it at most
    ``num_pending_most`` tokens are new to the drafter. ``steps`` counts those of (drafts, accepted
    drafts). ``num_alone`` of its next steps it shares with nobody.
    """

    identity: Identity
    row: int
    pages: list[int]
    num_most_pages: int
    num_prompt: int
    num_output: int
    max_output: int
    request: Request = field(init=False)
    stops: frozenset[int] = field(init=False)
    limit: int = field(init=False)
    max_drafts: int = field(init=False)
    active: bool = False
    ended: bool = False
    num_in_flight: int = 0
    num_last_drafts: int = 0
    num_pending_most: int = 1
    num_alone: int = 0
    first_accepted: int = 0
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)

    def begin(
        self, request: Request, stops: frozenset[int], max_drafts: int, is_suspect: bool = False
    ) -> None:
        """The request that the grant was for; a step uses at most ``max_drafts``. If it is what
        failed a step, it will do so again before it has made NUM_STEPS_ALONE."""
        asked = request.speculation.max_drafts
        self.num_alone = NUM_STEPS_ALONE if is_suspect else 0
        self.request = request
        self.stops = stops
        self.limit = max_drafts if asked is None else min(asked, max_drafts)
        self.max_drafts = max_drafts

    @property
    def num_budget(self) -> int:
        return self.max_output - self.num_output

    @property
    def num_known_most(self) -> int:
        """Tokens of prompt and answer, at most, once every step on its way is through."""
        num_coming = self.num_in_flight * (self.num_last_drafts + 1)
        return self.num_prompt + self.num_output + num_coming

    def launched(self, num_drafts: int, catches_up: bool) -> None:
        """In a step that all its pending tokens are part of, or none."""
        self.num_last_drafts = num_drafts
        self.num_pending_most = num_drafts + 1 + (0 if catches_up else self.num_pending_most)

    def record(self, num_drafted: int, num_accepted: int, num_kept: int) -> None:
        """Count one step whose run of ``num_accepted`` drafts plus one token was cut to
        ``num_kept`` tokens: what was cut off does not count as accepted."""
        num_accepted = min(num_accepted, num_kept)
        if not self.steps:
            self.first_accepted = num_accepted
        self.num_alone = max(0, self.num_alone - 1)
        self.steps[num_drafted, num_accepted] += 1

    @property
    def counts(self) -> SpeculationCounts:
        steps, places = self.steps.items(), range(self.max_drafts)
        return SpeculationCounts(
            num_steps=self.steps.total(),
            num_drafted=sum(drafted * num for (drafted, _), num in steps),
            num_accepted=sum(accepted * num for (_, accepted), num in steps),
            accepted_per_position=tuple(sum(n for (_, a), n in steps if a > i) for i in places),
            first_step_accepted=self.first_accepted,
            drafted_per_position=tuple(sum(n for (d, _), n in steps if d > i) for i in places),
        )
