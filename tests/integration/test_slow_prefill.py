"""A prompt may queue for longer than a lease: the decode rank that waits for it renews the
lease."""

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from tests.rig import rig
from tests.scene import prompts

LEASE_S, STEP_S = 1.0, 0.06
SETS = (
    "kv.num_pages=200", "kv.page_size=16", f"kv_transfer.lease_s={LEASE_S}",
    "prefill.max_num_batched_tokens=1",
)  # fmt: skip


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_the_lease_of_a_waiting_prompt_is_kept(
    small_model: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    [first], [second] = prompts(1, 40), prompts(1, 5)
    async with rig(small_model, *SETS, f"mode={mode}") as cluster:
        engine = cluster.prefills[0].engine
        step = engine.step

        def slow_step() -> None:
            time.sleep(STEP_S)  # time: leases are seconds, and two of them have to pass
            step()

        engine.step = slow_step  # type: ignore[method-assign]
        began = time.monotonic()
        asked = [greedy(str(i), ids, 5, ignore_eos=True) for i, ids in enumerate((first, second))]
        answers = await asyncio.gather(*(cluster.complete(request) for request in asked))
        assert time.monotonic() - began > 2 * LEASE_S  # time: or no lease could have ended
        for request, (tokens, _, _) in zip(asked, answers, strict=True):
            assert not near_ties(small_model, list(request.prompt_ids), tokens)
        assert "lease of" not in caplog.text and "trying again" not in caplog.text
        await cluster.check_empty()
