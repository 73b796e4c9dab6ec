"""The step planner: merges the proposals of all ranks into one plan.

The decision depends only on the proposals, the cost model and the program table. No other object
keeps the latter two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tandem.core.config import TandemConfig
from tandem.core.draft_shapes import DraftShapes
from tandem.core.execution import CAPTURED, EAGER, CatchUpPolicy
from tandem.decode_node.planning import draft_length
from tandem.decode_node.planning.buckets import bucket_for, resolve_buckets
from tandem.decode_node.planning.draft_length import DraftLengthPolicy, StepCostModel
from tandem.decode_node.planning.program_table import ProgramTable, common_step_keys
from tandem.decode_node.planning.step_plan import (
    PROFILE,
    StepKey,
    StepPlan,
    StepProposal,
    merge_traits,
)


class StepPlanner:
    """Decides the next step from the proposals of all ranks (runtime/lockstep.py: Decide).

    While no rank holds or awaits sequences, pending programs are captured (program_table.py). When
    none is pending and no rank has rows to compute, steps of unknown cost are measured if
    ``may_profile``.
    """

    def __init__(
        self,
        buckets: tuple[int, ...],
        draft_shapes: DraftShapes,
        length: DraftLengthPolicy,
        catch_up: CatchUpPolicy,
        may_profile: bool = False,
        common_keys: Iterable[StepKey] = (),
    ) -> None:
        self._buckets = buckets
        self._draft_length = length
        self._catch_up = catch_up
        self._draft_shapes = draft_shapes
        self._costs = StepCostModel.unprofiled(draft_shapes)
        self._is_adaptive = length is draft_length.adaptive and len(draft_shapes) > 1
        self.may_profile = may_profile and self._is_adaptive
        self._program_table = ProgramTable(common_keys)

    @classmethod
    def from_config(
        cls, config: TandemConfig, draft_shapes: DraftShapes, catch_up: CatchUpPolicy
    ) -> "StepPlanner":
        """Build the planner that ``config`` selects.

        Raises ValueError if ``decode.batch_sizes`` is out of range.
        """
        decode = config.decode
        speculation = config.speculation
        buckets = resolve_buckets(decode.batch_sizes, decode.max_num_seqs, decode.device)
        min_shape_index = (
            len(draft_shapes) - 1 if speculation.draft_length == draft_length.FIXED else 0
        )
        common_keys = common_step_keys(
            sizes=buckets,
            draft_shapes=draft_shapes,
            catch_up=catch_up,
            min_shape_index=min_shape_index,
        )
        length = draft_length.DRAFT_LENGTH_POLICIES[speculation.draft_length]
        return cls(
            buckets, draft_shapes, length, catch_up, speculation.profile_at_startup, common_keys
        )

    def __call__(self, proposals: Sequence[StepProposal]) -> StepPlan | None:
        exec_modes = {proposal.exec_mode for proposal in proposals}
        exec_mode = exec_modes.pop() if len(exec_modes) == 1 else EAGER
        for proposal in proposals:
            self._program_table.mark_uncapturable(proposal.uncapturable)
        if self._is_adaptive:
            draft_length.record_reports(
                self._costs,
                [proposal.report for proposal in proposals if proposal.report is not None],
            )
        if any(proposal.num_rows for proposal in proposals):
            num_context = max(proposal.num_context for proposal in proposals)
            plan = self._program_table.plan(self._choose_key(proposals, num_context), exec_mode)
            return replace(plan, num_context=num_context)
        if exec_mode == CAPTURED and self._program_table.has_pending_captures:
            has_pending_work = any(proposal.has_pending_work for proposal in proposals)
            return None if has_pending_work else self._program_table.next_capture()
        key = self._profile_key(proposals) if self.may_profile else None
        return None if key is None else self._program_table.plan(key, exec_mode, PROFILE)

    def _choose_key(self, proposals: Sequence[StepProposal], num_context: int) -> StepKey:
        """Choose the step key for all ranks, at least one of which has rows."""
        num_rows = bucket_for(max(proposal.num_rows for proposal in proposals), self._buckets)
        columns = zip(*(proposal.num_rows_by_limit for proposal in proposals), strict=True)
        shape_index = self._draft_length(self._costs, (num_rows, num_context), [*map(sum, columns)])
        backlog = max(proposal.backlog for proposal in proposals)
        amount = self._catch_up.catch_up_width(self._draft_shapes[shape_index].depth, backlog)
        traits = merge_traits(proposal.traits for proposal in proposals if proposal.num_rows)
        return StepKey(num_rows=num_rows, shape_index=shape_index, catch_up=amount, traits=traits)

    def _profile_key(self, proposals: Sequence[StepProposal]) -> StepKey | None:
        """Return the key of a step whose cost is unknown, or None if all have been measured."""
        if (next_unprofiled := self._costs.next_unprofiled(self._buckets)) is None:
            return None
        num_rows, shape_index = next_unprofiled
        amount = self._catch_up.catch_up_width(
            self._draft_shapes[shape_index].depth, self._catch_up.initial_backlog
        )
        return StepKey(num_rows, shape_index, amount)
