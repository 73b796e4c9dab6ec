"""A request's state on a decode rank."""

from dataclasses import dataclass, field

from core.request import Request, SpeculationCounts


@dataclass(slots=True)
class Sequence:
    """``num_most_pages`` is what the whole answer may need. ``num_output`` counts every token
    emitted so far, resumed ones too, as far as steps have been read. ``row`` and ``pages`` are
    owned from reservation until the sequence has ended and no step on its way (``num_in_flight``)
    may touch them. ``num_last_drafts`` are those of the step launched last.
    """

    request: Request
    row: int
    pages: list[int]
    num_most_pages: int
    stops: frozenset[int]
    max_output: int
    limit: int
    num_output: int = 0
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

    @property
    def num_budget(self) -> int:
        return self.max_output - self.num_output

    @property
    def num_known_most(self) -> int:
        """Tokens of prompt and answer, at most, once every step on its way is through."""
        num_coming = self.num_in_flight * (self.num_last_drafts + 1)
        return len(self.request.prompt_ids) + self.num_output + num_coming

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
