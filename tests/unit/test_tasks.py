import asyncio
import logging

import pytest

from tandem.core.errors import HandoverError
from tandem.core.tasks import Tasks, cancel_and_wait, run_periodically, start_in_thread
from tests.waiting import PATIENCE_S, for_ever, until


async def fails(error: BaseException) -> None:
    raise error


async def test_no_task_fails_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Unexpected errors are logged with a traceback. Named failures are raised where the task is
    awaited, and logged without one."""
    caplog.set_level(logging.INFO)
    tasks = Tasks()
    tasks.start(fails(HandoverError("the peer is gone")))
    tasks.start(fails(KeyError("a bug")))
    tasks.start(for_ever()).cancel()
    await tasks.finish()
    told = {(record.levelname, bool(record.exc_info)) for record in caplog.records}
    assert told == {("INFO", False), ("ERROR", True)} and not len(tasks)
    assert "the peer is gone" in caplog.text and "a bug" in caplog.text


async def test_what_is_done_again_and_again_outlives_a_turn_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns: list[int] = []

    async def turn() -> None:
        turns.append(len(turns))
        if len(turns) == 2:
            raise KeyError("a bug")

    task = asyncio.create_task(run_periodically(0.001, turn))
    await until(lambda: len(turns) >= 4)
    await cancel_and_wait(task)
    assert task.cancelled() and [bool(record.exc_info) for record in caplog.records] == [True]


def test_what_runs_on_a_thread_tells_its_end_and_cannot_be_cancelled() -> None:
    future = start_in_thread(lambda: 7)
    assert not future.cancel() and future.result(PATIENCE_S) == 7
    with pytest.raises(ZeroDivisionError):
        start_in_thread(lambda: 1 // 0).result(PATIENCE_S)
