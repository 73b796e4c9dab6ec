import asyncio
import logging

import pytest

from core.errors import HandoverError
from core.tasks import Tasks, threaded


async def fails(error: BaseException) -> None:
    raise error


async def test_no_task_fails_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Ours with a traceback; a failure that has a name goes to whoever awaits it, and is noted."""
    caplog.set_level(logging.INFO)
    tasks = Tasks()
    tasks.start(fails(HandoverError("the peer is gone")))
    tasks.start(fails(KeyError("a bug")))
    tasks.start(asyncio.sleep(60)).cancel()
    await tasks.finish()
    told = {(record.levelname, bool(record.exc_info)) for record in caplog.records}
    assert told == {("INFO", False), ("ERROR", True)} and not len(tasks)
    assert "the peer is gone" in caplog.text and "a bug" in caplog.text


def test_what_runs_on_a_thread_tells_its_end_and_cannot_be_cancelled() -> None:
    future = threaded(lambda: 7)
    assert not future.cancel() and future.result(5) == 7
    with pytest.raises(ZeroDivisionError):
        threaded(lambda: 1 // 0).result(5)
