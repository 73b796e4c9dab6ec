"""What a step shall be. Every rank of a gang makes a Proposal, one planner answers all of them with
one StepPlan, and what a rank then launches derives from that alone (design.md, Parallelism). Plain
Python.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.execution import EAGER
from tandem.core.request import ACCEPTANCES, STRICT
from tandem.decode_node.planning.acceptance_stats import AcceptedPath, DepthTransitions
from tandem.decode_node.planning.states import RunningSequence


@dataclass(frozen=True, slots=True)
class SamplingTraits:
    """What rows of any rank ask for that is not plain.

    ``has_logit_rules``: some row adjusts its logits. ``kinds`` are kinds of acceptance
    (``program_rule_names``).
    """

    all_greedy: bool = True
    has_logit_rules: bool = False
    rule_names: tuple[str, ...] = (STRICT,)


GREEDY_TRAITS, SAMPLED_TRAITS = SamplingTraits(), SamplingTraits(all_greedy=False)
MAX_SAMPLING_TRAITS = 48
"""There are so many: programs of one size and length are no more than these times amounts."""


def program_rule_names(requested: Iterable[str]) -> tuple[str, ...]:
    """The kinds that a program judges by: those asked for, or all where several are beside strict
    rows, so that few programs serve all mixtures."""
    rule_names = {*requested} or {STRICT}
    return tuple(sorted(ACCEPTANCES if len(rule_names - {STRICT}) > 1 else rule_names))


def merge_traits(traits: Iterable[SamplingTraits]) -> SamplingTraits:
    """What these ask for together."""
    found = list(traits)
    return SamplingTraits(
        all(one.all_greedy for one in found),
        any(one.has_logit_rules for one in found),
        program_rule_names(kind for one in found for kind in one.rule_names),
    )


@dataclass(frozen=True, slots=True)
class StepKey:
    """All that decides on a step's program, the same on every rank: so captured collectives are
    replayed by all ranks or by none (NCCL user guide, Using NCCL with CUDA Graphs).

    ``num_rows`` is the bucket, padding included; ``shape_index`` how much is drafted
    (core/draft_shapes.py), ``catch_up`` what the drafter adds (core/execution.py).
    """

    num_rows: int
    shape_index: int
    catch_up: int
    traits: SamplingTraits = GREEDY_TRAITS


SERVE, PROFILE, CAPTURE = "serve", "profile", "capture"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step of all ranks. ``purpose`` is SERVE but for steps of nobody's rows: in a PROFILE
    all ranks run made-up ones, to learn what such a step costs; CAPTURE gets the program ready.

    ``program_id`` is the program's in the table of forms (program_table.py), None for eager steps,
    which are ``is_final_mode`` if no better form will follow. ``num_context`` is the most that a
    proposal had.
    """

    key: StepKey
    purpose: str = SERVE
    program_id: int | None = None
    is_final_mode: bool = True
    num_context: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step that was read: how long its program ran on this rank, and how many of the rank's rows
    came to each rung and went on (acceptance_stats.py). If it is not ``is_steady_state``, its next
    one will take less time. ``num_context`` is that of its plan."""

    key: StepKey
    program_s: float
    num_attempts: tuple[int, ...]
    num_successes: tuple[int, ...]
    is_steady_state: bool = True
    num_context: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """``num_rows_by_limit[k]`` of the rank's rows accept at most k drafts a step, and no row is
    further ``backlog`` (core/execution.py); ``traits`` are those of its rows. ``exec_mode`` is the
    best that its programs can have; those of the keys ``uncapturable`` cannot be made. It
    ``has_pending_work`` work while a prompt is being read. ``report`` is of the step read last,
    None if it was told already. ``num_context`` tokens are known of a row on average."""

    num_rows_by_limit: tuple[int, ...]
    backlog: int = 0
    traits: SamplingTraits = GREEDY_TRAITS
    exec_mode: str = EAGER
    uncapturable: tuple[StepKey, ...] = ()
    has_pending_work: bool = False
    report: StepReport | None = None
    num_context: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_by_limit)


def proposal_for(sequences: Sequence[RunningSequence], max_depth: int, **fields: Any) -> Proposal:
    """What follows from its rows, which may be none, and the ``rest`` of a Proposal."""
    limits = [sequence.draft_limit for sequence in sequences]
    settings = [one.request.sampling for one in sequences]
    traits = SamplingTraits(
        all_greedy=all(one.temperature == 0 for one in settings),
        has_logit_rules=any(one.adjusts_logits for one in settings),
        rule_names=program_rule_names(one.request.speculation.acceptance for one in sequences),
    )
    backlog = max((one.backlog for one in sequences), default=0)
    num_context = sum(one.num_known for one in sequences) // max(1, len(sequences))
    num_rows_by_limit = tuple(map(limits.count, range(max_depth + 1)))
    return Proposal(num_rows_by_limit, backlog, traits, num_context=num_context, **fields)


def step_report(
    transitions: DepthTransitions,
    plan: StepPlan,
    program_s: float,
    rows: Sequence[AcceptedPath],
    is_steady_state: bool = True,
) -> StepReport:
    """Of a step that brought its ``rows`` so far."""
    counts = transitions.count(plan.key.shape_index, rows)
    return StepReport(plan.key, program_s, *counts, is_steady_state, plan.num_context)
