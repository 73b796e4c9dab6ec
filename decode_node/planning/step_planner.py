"""Who answers proposals with a plan. The decision depends on nothing but all proposals, the cost
table and the table of forms, which only the planner keeps."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tandem.core.config import TandemConfig
from tandem.core.forms import CAPTURED, EAGER, CatchUp
from tandem.core.levels import Levels
from tandem.decode_node.planning import lengths
from tandem.decode_node.planning.buckets import bucket_for, buckets_of
from tandem.decode_node.planning.forms import Forms, usual_keys
from tandem.decode_node.planning.lengths import Costs, DraftLength
from tandem.decode_node.planning.step_plan import TRIAL, Proposal, StepKey, StepPlan, extras_of_all


class StepPlanner:
    """Decides by all ranks' proposals (runtime/lockstep.py: Decide). While nobody has or expects
    work, programs are made if ranks can (forms.py). Then, while nobody has work, what the cost
    table lacks is measured if it ``measures``.
    """

    def __init__(
        self,
        buckets: tuple[int, ...],
        levels: Levels,
        length: DraftLength,
        catch_up: CatchUp,
        measures: bool = False,
        usual: Iterable[StepKey] = (),
    ) -> None:
        self._buckets, self._length, self._catch_up = buckets, length, catch_up
        self._levels, self._costs = levels, Costs.unknown(levels)
        self._learns = length is lengths.adaptive and len(levels) > 1
        self.measures = measures and self._learns
        self._forms = Forms(usual)

    @classmethod
    def of(cls, config: TandemConfig, levels: Levels, catch_up: CatchUp) -> "StepPlanner":
        """As configured. Raises ValueError for batch sizes that are out of range."""
        decode, asked = config.decode, config.speculation
        buckets = buckets_of(decode.batch_sizes, decode.max_num_seqs, decode.device)
        least = len(levels) - 1 if asked.draft_length == lengths.FIXED else 0
        usual = usual_keys(buckets, levels, catch_up, least)
        length = lengths.LENGTHS[asked.draft_length]
        return cls(buckets, levels, length, catch_up, asked.profile_at_startup, usual)

    def __call__(self, proposals: Sequence[Proposal]) -> StepPlan | None:
        forms = {proposal.form for proposal in proposals}
        form = forms.pop() if len(forms) == 1 else EAGER
        for proposal in proposals:
            self._forms.refuse(proposal.refused)
        if self._learns:
            lengths.record(self._costs, [one.report for one in proposals if one.report is not None])
        if any(proposal.num_rows for proposal in proposals):
            num_context = max(proposal.num_context for proposal in proposals)
            plan = self._forms.plan(self._step(proposals, num_context), form)
            return replace(plan, num_context=num_context)
        if form == CAPTURED and self._forms.lacks:
            expects = any(proposal.expects for proposal in proposals)
            return None if expects else self._forms.make()
        key = self._trial(proposals) if self.measures else None
        return None if key is None else self._forms.plan(key, form, TRIAL)

    def _step(self, proposals: Sequence[Proposal], num_context: int) -> StepKey:
        """What suits all ranks, of which some have work."""
        num_rows = bucket_for(max(one.num_rows for one in proposals), self._buckets)
        columns = zip(*(proposal.num_rows_by_limit for proposal in proposals), strict=True)
        level = self._length(self._costs, (num_rows, num_context), [*map(sum, columns)])
        behind = max(proposal.behind for proposal in proposals)
        amount = self._catch_up.amount(self._levels[level].depth, behind)
        extras = extras_of_all(proposal.extras for proposal in proposals if proposal.num_rows)
        return StepKey(num_rows, level, amount, extras)

    def _trial(self, proposals: Sequence[Proposal]) -> StepKey | None:
        """What was not measured yet, None if all was."""
        if (untried := self._costs.untried(self._buckets)) is None:
            return None
        num_rows, level = untried
        amount = self._catch_up.amount(self._levels[level].depth, self._catch_up.start)
        return StepKey(num_rows, level, amount)
