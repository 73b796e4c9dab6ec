"""Messages of step planning: each rank's Proposal and the common StepPlan.

The ranks of a gang run every step together. Each sends a Proposal; the planner, at rank 0, returns
one StepPlan for all. A rank launches exactly what the plan says. Plain Python.
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
    """Sampling features that a step's program must support, for the rows of all ranks.

    ``has_logit_rules``: some row adjusts its logits. ``rule_names`` are the acceptance rules
    (``program_rule_names``).
    """

    all_greedy: bool = True
    has_logit_rules: bool = False
    rule_names: tuple[str, ...] = (STRICT,)


GREEDY_TRAITS = SamplingTraits()
SAMPLED_TRAITS = SamplingTraits(all_greedy=False)
MAX_SAMPLING_TRAITS = 48
"""Number of different SamplingTraits. For one batch size and draft shape, there is at most one
program per SamplingTraits and catch-up width."""


def program_rule_names(requested: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted acceptance rules of a program whose rows request ``requested``.

    If rows request more than one rule besides strict, all rules are returned. A few programs then
    serve all mixtures of rules.
    """
    rule_names = {*requested} or {STRICT}
    return tuple(sorted(ACCEPTANCES if len(rule_names - {STRICT}) > 1 else rule_names))


def merge_traits(traits: Iterable[SamplingTraits]) -> SamplingTraits:
    """Return the traits of a program that supports all of ``traits``."""
    found = list(traits)
    return SamplingTraits(
        all(own.all_greedy for own in found),
        any(own.has_logit_rules for own in found),
        program_rule_names(rule for own in found for rule in own.rule_names),
    )


@dataclass(frozen=True, slots=True)
class StepKey:
    """Key of a step's program, the same on every rank.

    Because of this, all ranks replay a captured collective or none does, as NCCL requires (NCCL
    user guide, Using NCCL with CUDA Graphs).

    Attributes:
        num_rows: Batch size of each rank, padding included.
        shape_index: Index of the draft shape (core/draft_shapes.py). 0: no drafts.
        catch_up: Backlog that the drafter catches up with in the step (core/execution.py).
        traits: Sampling features of the program.
    """

    num_rows: int
    shape_index: int
    catch_up: int
    traits: SamplingTraits = GREEDY_TRAITS


SERVE = "serve"
PROFILE = "profile"
CAPTURE = "capture"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step of all ranks.

    Attributes:
        purpose: SERVE computes sequences. PROFILE measures the time of a step on dummy rows.
            CAPTURE captures the program on padding rows.
        program_id: Number of the program in the ProgramTable. None: the step runs eagerly.
        is_final_mode: False for an eager step whose program will be captured later.
        num_context: Maximum ``num_context`` of all proposals.
    """

    key: StepKey
    purpose: str = SERVE
    program_id: int | None = None
    is_final_mode: bool = True
    num_context: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """Measurements of one completed step on one rank.

    Attributes:
        program_s: Run time of the tensor program, in seconds.
        num_attempts: Number of rows that reached the start of each transition (acceptance_stats.py)
            and may go deeper.
        num_successes: Number of rows that reached the end of each transition.
        is_steady_state: False if later steps of this key will take less time.
        num_context: ``num_context`` of the plan.
    """

    key: StepKey
    program_s: float
    num_attempts: tuple[int, ...]
    num_successes: tuple[int, ...]
    is_steady_state: bool = True
    num_context: int = 0


@dataclass(frozen=True, slots=True)
class StepProposal:
    """One rank's requirements for the next step.

    Attributes:
        num_rows_by_limit: Number of rows that accept at most k drafts per step, by k.
        backlog: Maximum drafter backlog of the rows (core/execution.py).
        traits: Sampling features of the rows.
        exec_mode: Best execution mode that the rank supports.
        uncapturable: Keys whose programs this rank failed to capture.
        has_pending_work: Whether the rank holds or awaits sequences, including those whose prompt
            is still being prefilled.
        report: Report of the step read last. None if it was already sent.
        num_context: Average number of known tokens per row.
    """

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


def proposal_for(
    sequences: Sequence[RunningSequence], max_depth: int, **fields: Any
) -> StepProposal:
    """Build the StepProposal of a rank that runs ``sequences``, which may be empty.

    ``max_depth`` is the rank's maximum draft depth; ``fields`` are the remaining Proposal fields.
    """
    limits = [sequence.draft_limit for sequence in sequences]
    settings = [sequence.request.sampling for sequence in sequences]
    traits = SamplingTraits(
        all_greedy=all(sampling.temperature == 0 for sampling in settings),
        has_logit_rules=any(sampling.adjusts_logits for sampling in settings),
        rule_names=program_rule_names(
            sequence.request.speculation.acceptance for sequence in sequences
        ),
    )
    backlog = max((sequence.backlog for sequence in sequences), default=0)
    num_context = sum(sequence.num_known for sequence in sequences) // max(1, len(sequences))
    num_rows_by_limit = tuple(map(limits.count, range(max_depth + 1)))
    return StepProposal(num_rows_by_limit, backlog, traits, num_context=num_context, **fields)


def step_report(
    transitions: DepthTransitions,
    plan: StepPlan,
    program_s: float,
    rows: Sequence[AcceptedPath],
    is_steady_state: bool = True,
) -> StepReport:
    """Build the report of a step whose rows accepted the paths ``rows``."""
    counts = transitions.count(plan.key.shape_index, rows)
    return StepReport(plan.key, program_s, *counts, is_steady_state, plan.num_context)
