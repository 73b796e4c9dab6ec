"""The failure history of an answer (cluster/gateway/recovery.py), by the steps that killed
ranks."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.gateway.recovery import MAX_FATAL_STEPS, AttemptHistory
from tandem.core.errors import PoisonRequest
from tandem.core.identity import Identity
from tandem.core.membership import InFlightBatch


def trials_after(*steps: InFlightBatch, has_failed: bool = False) -> AttemptHistory:
    """Return the history of an answer whose attempts were in all of these steps."""
    fleet: Any = SimpleNamespace(fatal_steps=deque(steps), is_cause_known=lambda rank: True)
    lost = {identity for step in steps for identity in step.identities[:1]}
    return AttemptHistory(fleet, has_failed=has_failed, lost_attempts=lost)


def step(number: int, *others: str, is_isolated: bool = False) -> InFlightBatch:
    return InFlightBatch((Identity(f"mine-{number}"), *map(Identity, others)), is_isolated)


def test_alone_in_one_step_that_killed_a_rank_is_not_poison_yet() -> None:
    """An answer that ran alone in one step that killed a rank remains a suspect. It ran alone
    because of an unexplained death (seed 10,167 of the simulation)."""
    assert trials_after(step(1, is_isolated=True)).is_suspect()


@pytest.mark.parametrize("has_failed", [False, True])
def test_alone_in_the_second_is_poison(has_failed: bool) -> None:
    """An answer that ran alone in a second failed step is poison, whether the first killed its rank
    or only failed."""
    first = [] if has_failed else [step(1, "another")]
    with pytest.raises(PoisonRequest, match="alone"):
        trials_after(*first, step(2, is_isolated=True), has_failed=has_failed).is_suspect()


def test_in_many_is_poison_though_never_alone() -> None:
    with pytest.raises(PoisonRequest, match="the request was in"):
        trials_after(*(step(n, "another") for n in range(MAX_FATAL_STEPS))).is_suspect()
    assert trials_after(*(step(n, "another") for n in range(MAX_FATAL_STEPS - 1))).is_suspect()


def test_who_was_elsewhere_is_not_suspected() -> None:
    attempts = trials_after()
    attempts.fleet.fatal_steps.append(step(1, is_isolated=True))
    assert not attempts.is_suspect()
