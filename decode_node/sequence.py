"""A request's state on a decode rank."""

from dataclasses import dataclass, field

from core.answer import SpeculationCounts
from core.identity import Identity
from core.request import Request


@dataclass(frozen=True, slots=True)
class Size:
    """What is known of a request before it comes: tokens of its prompt, emitted, and at most."""

    num_prompt: int
    num_output: int
    max_tokens: int

    @property
    def is_begun(self) -> bool:
        """Its client has tokens already."""
        return self.num_output > 0


@dataclass(slots=True)
class Sequence:
    """A granted row and its pages, and from ``begin`` on the request that runs in it.

    ``num_most_pages`` is what the whole answer may need. ``num_output`` counts every token
    emitted so far, resumed ones too, as far as steps have been read. ``row`` and ``pages`` are
    owned from the grant until the sequence has ended and no step on its way (``num_in_flight``)
    may touch them. ``num_last_drafts`` are those of the step launched last.
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
    active: bool = False
    ended: bool = False
    num_in_flight: int = 0
    num_last_drafts: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    first_step_accepted: int = 0

    def begin(self, request: Request, stops: frozenset[int], max_drafts: int) -> None:
        """The request that the grant was for; a step uses at most ``max_drafts``."""
        asked = request.speculation.max_drafts
        self.request = request
        self.stops = stops
        self.limit = max_drafts if asked is None else min(asked, max_drafts)
        self.accepted_per_position = [0] * max_drafts
        self.drafted_per_position = [0] * max_drafts

    @property
    def num_budget(self) -> int:
        return self.max_output - self.num_output

    @property
    def num_known_most(self) -> int:
        """Tokens of prompt and answer, at most, once every step on its way is through."""
        num_coming = self.num_in_flight * (self.num_last_drafts + 1)
        return self.num_prompt + self.num_output + num_coming

    def record(self, num_drafted: int, num_accepted: int, num_kept: int) -> None:
        """Count one step whose run of ``num_accepted`` drafts plus one token was cut to
        ``num_kept`` tokens: what was cut off does not count as accepted."""
        num_accepted = min(num_accepted, num_kept)
        if self.num_steps == 0:
            self.first_step_accepted = num_accepted
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1
        for i in range(num_drafted):
            self.drafted_per_position[i] += 1

    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(
            num_steps=self.num_steps,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            accepted_per_position=tuple(self.accepted_per_position),
            first_step_accepted=self.first_step_accepted,
            drafted_per_position=tuple(self.drafted_per_position),
        )
