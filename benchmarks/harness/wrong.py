"""Drafts that are wrong and become right: how soon the adaptive draft length follows."""

import statistics
from typing import Any

import torch

from benchmarks.harness.turns import adaptive_arm
from tandem.core.draft_shapes import DraftShape
from tandem.core.request import Request
from tandem.model.drafters.base import DraftContext, Drafter, DrafterState, Drafts
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import Caches

NUM_BEFORE, NUM_AFTER = 400, 800
"""Numbers of steps with wrong drafts and with right ones."""
ALIKE = 0.97


class Wrong:
    """The checkpoint's drafter, whose drafts are replaced by other tokens while ``shift_1`` is not
    0.

    ``shift_1`` is a tensor because recorded programs read it.
    """

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size
        self.shift_1 = torch.ones(1, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draft(
        self,
        state: DrafterState,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        drafts = self._inner.draft(state, context, draft_shape, catch_up_width, caches)
        return drafts._replace(tokens_BN=(drafts.tokens_BN + self.shift_1) % self._vocab_size)


def changed(
    loaded: LoadedModel, depth: int, wrong: Wrong, asked: list[Request], num_rows: int
) -> tuple[int, int, int]:
    """Return the draft shape used before drafts became right, the one used long after, and the
    steps until a nearly optimal one is used.

    A shape is nearly optimal if its speed is ``ALIKE`` of the best or more, by the final costs.
    """
    arm = adaptive_arm(loaded, depth, asked, num_rows)
    wrong.shift_1.fill_(1)
    lengths = []
    for step in range(NUM_BEFORE + NUM_AFTER):
        if step == NUM_BEFORE:
            wrong.shift_1.fill_(0)
        arm.step()
        size = arm.costs.bucket_costs(num_rows, arm.engine.num_context)
        lengths.append(size.current_shape)
    after = statistics.mode(lengths[-200:])
    times = zip(arm.costs.expected_tokens(), size.step_s, strict=True)
    worth = [by_depth[-1] / step_s for by_depth, step_s in times]
    good = [n >= ALIKE * max(worth) for n in worth]
    found = (step for step, n in enumerate(lengths[NUM_BEFORE:]) if good[n])
    return lengths[NUM_BEFORE - 1], after, next(found, NUM_AFTER)
