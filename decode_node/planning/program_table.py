"""Execution mode of each step program: eager, recorded or captured.

Only the planner keeps this table, so all ranks of a gang agree on the mode.
"""

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
"""Maximum number of programs that a rank keeps. The least recently used one is evicted."""
MAX_EAGER_STEPS = 128
"""Number of eager steps after which a program is captured even if sequences have to wait. A capture
takes about as long as these steps lose by running eagerly."""
MAX_UNCAPTURABLE = 3
"""Number of failed programs after which no more are recorded or captured. In a gang, each failure
ends an epoch."""


class ProgramTable:
    """The program of each step key, and how it executes.

    In recorded mode, the first step of a key records its program. In captured mode, programs are
    captured in separate CAPTURE steps while no rank has work. These are the programs of the
    ``common_keys`` and of all keys that steps have used. A key's steps run eagerly until its
    program is captured. After MAX_EAGER_STEPS eager steps, it is captured at once.

    If a rank fails to capture a key, that key stays eager on all ranks. Other keys are not affected
    until MAX_UNCAPTURABLE have failed.
    """

    def __init__(self, common_keys: Iterable[StepKey] = ()) -> None:
        self._num_steps_wanted = dict.fromkeys(common_keys, 0)
        """Number of eager steps so far, for each key whose program is to be captured."""
        self._program_ids: OrderedDict[StepKey, int] = OrderedDict()
        """Numbers of the programs that ranks keep, least recently used first."""
        self._free_ids = list(range(MAX_PROGRAMS - 1, -1, -1))
        self._uncapturable: set[StepKey] = set()

    def mark_uncapturable(self, keys: Iterable[StepKey]) -> None:
        """Make ``keys``, which some rank failed to capture, eager permanently."""
        for key in keys:
            self._uncapturable.add(key)
            self._num_steps_wanted.pop(key, None)
            if key in self._program_ids:
                self._free_ids.append(self._program_ids.pop(key))

    def plan(self, key: StepKey, exec_mode: str, purpose: str = SERVE) -> StepPlan:
        """Return the plan for a step of ``key``, or for a step that first captures its program.

        ``exec_mode`` is the best execution mode that all ranks support.
        """
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
        """Whether there are programs to capture while no rank has work."""
        return bool(self._num_steps_wanted) and self._may_capture

    def next_capture(self) -> StepPlan:
        """Return the plan that captures the first pending program."""
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
    sizes: Iterable[int],
    draft_shapes: DraftShapes,
    catch_up: CatchUpPolicy,
    min_shape_index: int = 0,
) -> list[StepKey]:
    """Return the keys of the most frequent steps, largest batch size first.

    For each size, these are all combinations of a draft shape from ``min_shape_index`` on, a usual
    catch-up width, and greedy or sampled rows.
    """
    return [
        StepKey(num_rows=num_rows, shape_index=shape_index, catch_up=amount, traits=traits)
        for num_rows in sorted(sizes, reverse=True)
        for shape_index in range(min_shape_index, len(draft_shapes))
        for amount in catch_up.common_widths(draft_shapes[shape_index].depth)
        for traits in (GREEDY_TRAITS, SAMPLED_TRAITS)
    ]
