"""In which form each program runs: the one table of it, which the planner keeps for all ranks."""

from collections import OrderedDict
from collections.abc import Iterable

from tandem.core.draft_shapes import DraftShapes
from tandem.core.execution import CAPTURED, EAGER, CatchUpPolicy
from tandem.decode_node.planning.step_plan import (
    CAPTURE,
    GREEDY_TRAITS,
    SAMPLED_TRAITS,
    SERVE,
    StepKey,
    StepPlan,
)

MAX_PROGRAMS = 256
"""Programs that ranks keep. The one unused for longest makes room for another."""
MAX_EAGER_STEPS = 128
"""Steps for which a program is not made because somebody would wait. Making one takes about as long
as these lose."""
MAX_UNCAPTURABLE = 3
"""Programs that cannot be made, after which no more are tried: each try in a gang ends a life."""


class ProgramTable:
    """Programs by key. Where ranks record, the first step that wants a program makes it. Where they
    capture, programs are made by steps of their own: the ``usual`` ones and what was asked for
    while nobody has work, or else after MAX_EAGER_STEPS steps without; until then their steps are
    eager. One that a rank refuses is eager for good, and changes nothing for the others.
    """

    def __init__(self, common_keys: Iterable[StepKey] = ()) -> None:
        self._num_steps_wanted = dict.fromkeys(common_keys, 0)
        """Not made yet, and for how many steps each was asked for."""
        self._program_ids: OrderedDict[StepKey, int] = OrderedDict()
        """Of what ranks keep; the one unused for longest first."""
        self._free_ids = list(range(MAX_PROGRAMS - 1, -1, -1))
        self._uncapturable: set[StepKey] = set()

    def mark_uncapturable(self, keys: Iterable[StepKey]) -> None:
        """A rank could not make these."""
        for key in keys:
            self._uncapturable.add(key)
            self._num_steps_wanted.pop(key, None)
            if key in self._program_ids:
                self._free_ids.append(self._program_ids.pop(key))

    def plan(self, key: StepKey, exec_mode: str, purpose: str = SERVE) -> StepPlan:
        """That step where ``form`` is the best that all ranks can have, or what gets its program
        ready."""
        if key in self._program_ids:
            self._program_ids.move_to_end(key)
            return StepPlan(key, purpose, self._program_ids[key])
        if exec_mode == EAGER or key in self._uncapturable or not self._may_capture:
            return StepPlan(key, purpose)
        if exec_mode != CAPTURED:
            return StepPlan(key, purpose, self._assign_id(key))
        num_steps = self._num_steps_wanted[key] = self._num_steps_wanted.get(key, 0) + 1
        return (
            self._capture_plan(key)
            if num_steps > MAX_EAGER_STEPS
            else StepPlan(key, purpose, is_final_mode=False)
        )

    @property
    def has_pending_captures(self) -> bool:
        """Whether a program is to be made while nobody has work."""
        return bool(self._num_steps_wanted) and self._may_capture

    def next_capture(self) -> StepPlan:
        """What gets the first of those ready."""
        return self._capture_plan(next(iter(self._num_steps_wanted)))

    @property
    def _may_capture(self) -> bool:
        return len(self._uncapturable) < MAX_UNCAPTURABLE

    def _capture_plan(self, key: StepKey) -> StepPlan:
        del self._num_steps_wanted[key]
        return StepPlan(key, CAPTURE, self._assign_id(key))

    def _assign_id(self, key: StepKey) -> int:
        program_id = (
            self._free_ids.pop() if self._free_ids else self._program_ids.popitem(last=False)[1]
        )
        self._program_ids[key] = program_id
        return program_id


def common_step_keys(
    sizes: Iterable[int], levels: DraftShapes, catch_up: CatchUpPolicy, min_shape_index: int = 0
) -> list[StepKey]:
    """Of steps with nothing but greedy rows and of those with sampled ones, the largest first, of
    levels from ``min_shape_index`` on."""
    return [
        StepKey(num_rows, level, amount, traits)
        for num_rows in sorted(sizes, reverse=True)
        for level in range(min_shape_index, len(levels))
        for amount in catch_up.common_widths(levels[level].depth)
        for traits in (GREEDY_TRAITS, SAMPLED_TRAITS)
    ]
