"""States of a sequence on a decode rank: waiting, granted, running. Plain Python."""

from collections import Counter
from dataclasses import dataclass, field

from tandem.core.answer import SpeculationCounts
from tandem.core.draft_shapes import DraftShape
from tandem.core.identity import Identity
from tandem.core.request import Request

NUM_ISOLATED_STEPS = 8
"""Number of first steps that a suspect sequence runs alone. It exceeds the number of tokens that a
lost rank may have produced but not sent. If the sequence crashed that rank, it therefore repeats
the crash within these steps."""


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Size of a request, known before the request itself arrives.

    Attributes:
        num_prompt: Number of prompt tokens.
        num_output: Number of output tokens emitted earlier, if the request resumes.
        max_tokens: Maximum number of output tokens.
        is_resumed: Whether the cluster has already emitted tokens of the output.
    """

    num_prompt: int
    num_output: int
    max_tokens: int
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Upper bounds of a sequence: ``max_pages`` KV pages and ``max_output`` output tokens."""

    size: RequestSize
    max_pages: int
    max_output: int


@dataclass(frozen=True, slots=True)
class GrantedSequence:
    """A sequence that owns ``row`` and ``pages`` and whose KV cache has not arrived yet."""

    identity: Identity
    row: int
    pages: tuple[int, ...]
    limits: RequestLimits


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence that takes part in steps, from its first token on.

    After its end, row and pages are freed once no step in flight may access them.

    Attributes:
        pages: KV pages in order; the list grows with the sequence.
        num_output: Number of output tokens from all steps read so far, including those before a
            resume.
        draft_limit: Maximum number of drafts that the sequence accepts per step.
        max_depth: Maximum draft depth of the rank.
        backlog: Upper bound of the drafter's backlog after the latest launched step, in the
            drafter's own unit (core/execution.py).
        num_isolated_steps: Number of further steps in which the sequence must run alone.
        num_in_flight: Number of steps that were launched and not yet read.
        last_depth: Draft depth of the latest launched step.
        first_accepted: Number of drafts accepted in the first step.
        steps: Number of steps by (draft depth, drafted nodes, accepted drafts).
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
        """Number of prompt and output tokens."""
        return self.limits.size.num_prompt + self.num_output

    @property
    def max_num_known(self) -> int:
        """Upper bound of ``num_known`` once all in-flight steps have completed."""
        return self.num_known + self.num_in_flight * (self.last_depth + 1)

    def record_step(self, draft_shape: DraftShape, num_accepted: int, num_kept: int) -> None:
        """Count one step that emitted ``num_accepted`` drafts plus one token.

        Only the first ``num_kept`` of these tokens were kept, because the sequence ended there. The
        others do not count as accepted.
        """
        num_accepted = min(num_accepted, num_kept)
        if not self.steps:
            self.first_accepted = num_accepted
        self.num_output += num_kept
        self.num_isolated_steps = max(0, self.num_isolated_steps - 1)
        self.steps[
            min(draft_shape.depth, self.draft_limit), draft_shape.num_nodes, num_accepted
        ] += 1

    @property
    def counts(self) -> SpeculationCounts:
        steps = self.steps.items()
        places = range(self.max_depth)
        return SpeculationCounts(
            num_steps=self.steps.total(),
            num_drafted=sum(drafted * num for (drafted, _, _), num in steps),
            num_accepted=sum(accepted * num for (_, _, accepted), num in steps),
            accepted_per_position=tuple(sum(n for (_, _, a), n in steps if a > i) for i in places),
            first_step_accepted=self.first_accepted,
            drafted_per_position=tuple(sum(n for (d, _, _), n in steps if d > i) for i in places),
            num_nodes=sum(nodes * num for (drafted, nodes, _), num in steps if drafted),
        )
