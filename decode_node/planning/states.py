"""What a sequence on a decode rank needs while it waits, and what it is from then on: granted, then
running. Each has what is known by then. Plain Python."""

from collections import Counter
from dataclasses import dataclass, field

from tandem.core.answer import SpeculationCounts
from tandem.core.draft_shapes import DraftShape
from tandem.core.identity import Identity
from tandem.core.request import Request

NUM_ISOLATED_STEPS = 8
"""Of what may have failed a step: if it was that, it fails again before it has made so many. More
than the tokens that a lost rank had made and not told."""


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What is known of a request before it comes: tokens of its prompt, emitted, and at most, and
    whether it is begun (core/request.py)."""

    num_prompt: int
    num_output: int
    max_tokens: int
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The whole answer may need ``max_pages`` and ends at ``max_output``."""

    size: RequestSize
    max_pages: int
    max_output: int


@dataclass(frozen=True, slots=True)
class GrantedSequence:
    """Owns ``row`` and ``pages``, into which its KV comes."""

    identity: Identity
    row: int
    pages: tuple[int, ...]
    limits: RequestLimits


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A request that runs in its row, from its first token on. When it has ended, row and pages are
    free once no step on its way may touch them.

    ``num_output`` counts every token emitted so far, resumed ones too, as far as steps have been
    read, and ``pages`` grow. It accepts at most ``draft_limit`` drafts a step, of ``max_depth``.
    ``last_depth`` is that of the step launched last, and behind it the drafter is at most so far
    ``backlog`` (core/execution.py). ``steps`` counts those of (depth, nodes drafted, drafts
    accepted). ``num_isolated_steps`` of its next steps it shares with nobody.
    """

    identity: Identity
    row: int
    pages: list[int]
    limits: RequestLimits
    num_output: int
    request: Request
    stop_ids: frozenset[int]
    draft_limit: int
    max_depth: int
    backlog: int = 0
    num_isolated_steps: int = 0
    num_in_flight: int = 0
    last_depth: int = 0
    first_accepted: int = 0
    steps: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    @property
    def num_output_left(self) -> int:
        return self.limits.max_output - self.num_output

    @property
    def num_known(self) -> int:
        """Tokens of prompt and answer."""
        return self.limits.size.num_prompt + self.num_output

    @property
    def max_num_known(self) -> int:
        """The same, at most, once every step on its way is through."""
        return self.num_known + self.num_in_flight * (self.last_depth + 1)

    def record_step(self, level: DraftShape, num_accepted: int, num_kept: int) -> None:
        """Count one step whose run of ``num_accepted`` drafts plus one token was cut to
        ``num_kept`` tokens: what was cut off does not count as accepted."""
        num_accepted = min(num_accepted, num_kept)
        if not self.steps:
            self.first_accepted = num_accepted
        self.num_output += num_kept
        self.num_isolated_steps = max(0, self.num_isolated_steps - 1)
        self.steps[min(level.depth, self.draft_limit), level.num_nodes, num_accepted] += 1

    @property
    def counts(self) -> SpeculationCounts:
        steps, places = self.steps.items(), range(self.max_depth)
        return SpeculationCounts(
            num_steps=self.steps.total(),
            num_drafted=sum(drafted * num for (drafted, _, _), num in steps),
            num_accepted=sum(accepted * num for (_, _, accepted), num in steps),
            accepted_per_position=tuple(sum(n for (_, _, a), n in steps if a > i) for i in places),
            first_step_accepted=self.first_accepted,
            drafted_per_position=tuple(sum(n for (d, _, _), n in steps if d > i) for i in places),
            num_nodes=sum(nodes * num for (drafted, nodes, _), num in steps if drafted),
        )
