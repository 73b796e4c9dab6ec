"""Row counts are read on the engine thread, rarely, and one reading at a time."""

import asyncio

import pytest

from tandem.core.placement import Placement
from tandem.model.network.dispatch.base import Dispatch
from tandem.runtime import computed_rows
from tandem.runtime.computed_rows import ComputedRows
from tandem.runtime.engine_loop import EngineLoop
from tests.waiting import PATIENCE_S, until


class Counting(Dispatch):
    """A gang's dispatch whose every reading finds one more row."""

    num_read = 0

    def num_computed_rows(self) -> list[int]:
        self.num_read += 1
        return [self.num_read, 0]


async def latest_after_a_turn(rows: ComputedRows, loop: EngineLoop) -> tuple[int, ...]:
    rows.latest()
    async with asyncio.timeout(PATIENCE_S):
        await loop.call(lambda: None)
    return rows.latest()


async def test_one_reading_is_under_way_however_often_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computed_rows, "ROWS_S", 0.0)
    loop, dispatch = EngineLoop("engine"), Counting(2)
    dispatch.placement = Placement.in_order(1, 2, 2)
    rows = ComputedRows(loop, dispatch)
    assert [rows.latest() for _ in range(9)] == [()] * 9, "nobody waits for the engine"
    loop.start()
    await loop.call(lambda: None)
    assert dispatch.num_read == 1 and rows.latest() == (1, 0)
    await loop.call(lambda: None)
    assert rows.latest() == (2, 0), "it is read anew"
    loop.stop()


async def test_they_are_read_seldom_and_of_a_rank_alone_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computed_rows, "ROWS_S", PATIENCE_S)
    loop, dispatch, alone = EngineLoop("engine"), Counting(2), Counting(2)
    dispatch.placement = Placement.in_order(1, 2, 2)
    loop.start()
    rows = ComputedRows(loop, dispatch)
    for _ in range(3):
        assert await latest_after_a_turn(rows, loop) == (1, 0)
    assert await latest_after_a_turn(ComputedRows(loop, alone), loop) == ()
    assert (dispatch.num_read, alone.num_read) == (1, 0)
    loop.stop()


async def test_a_reading_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed_rows, "ROWS_S", 0.0)

    class Failing(Counting):
        def num_computed_rows(self) -> list[int]:
            counts = super().num_computed_rows()
            if self.num_read == 1:
                raise RuntimeError("the device is full")
            return counts

    loop, dispatch = EngineLoop("engine"), Failing(2)
    dispatch.placement = Placement.in_order(1, 2, 2)
    rows = ComputedRows(loop, dispatch)
    rows.latest()
    loop.start()
    await until(lambda: bool(rows.latest()))
    assert rows.latest() == (2, 0)
    loop.stop()
