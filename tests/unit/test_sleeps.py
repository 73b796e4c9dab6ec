"""Tests do not wait for time to pass, except where a comment says why. The checker finds those that
do."""

import pytest

from tests.sleeps import scan, scan_all

CLOCK = """
def test():
    began = time.monotonic()
    work()
    assert time.monotonic() - began < 60
"""
NAMED_CLOCK = """
def test():
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    assert seconds > stats.seconds
"""


def test_every_test_that_waits_for_time_says_why() -> None:
    assert [str(one) for one in scan_all() if not one.why] == []


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("time.sleep(0.1)", ["sleep"]),
        ("async def f(): await asyncio.sleep(delay_s)", ["sleep"]),
        ("async def f(): await asyncio.sleep(0)", []),
        ("started = sleep(PAUSE)", ["sleep"]),
        ("SCRIPT = '''\ntime.sleep(0.5)\n'''", ["sleep"]),
        ("done = event.wait(5)", ["bound"]),
        ("done = event.wait(30)", []),
        ("LONG_S = 30.0\ndone = event.wait(LONG_S)", []),
        ("LONG_S, SHORT_S = 30.0, 2\ndone = event.wait(SHORT_S + 1)", ["bound"]),
        ("from tests.waiting import PATIENCE_S\ndone = event.wait(PATIENCE_S / 100)", ["bound"]),
        ("from tests.waiting import PATIENCE_S\ndone = event.wait(PATIENCE_S)", []),
        ("async def f():\n  async with asyncio.timeout(2): pass", ["bound"]),
        ("async def f():\n  await asyncio.wait([task], timeout=1)", ["bound"]),
        ("async def f():\n  await asyncio.wait_for(work(), 1.5)", ["bound"]),
        ("future.result(2)", ["bound"]),
        ("process.communicate(timeout=10)", ["bound"]),
        ("', '.join(words)", []),
        ("found = result('name', 1.0)", []),
        (CLOCK, ["seconds"]),
        (NAMED_CLOCK, ["seconds"]),
    ],
)
def test_what_depends_on_time_is_found(source: str, kinds: list[str]) -> None:
    assert [one.kind for one in scan(source, "here")] == kinds
    assert not any(one.why for one in scan(source, "here"))


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(0.1)  # time: a lease",
        "# time: a lease\ntime.sleep(0.1)",
        "call(\n    a,\n    timeout=3,  # time: a lease\n)",
        "SCRIPT = '''\ntime.sleep(0.5)  # time: a lease\n'''",
    ],
)
def test_what_says_why_is_told_with_it(source: str) -> None:
    assert [one.why for one in scan(source, "here")] == ["a lease"]


def test_a_comment_further_off_says_nothing() -> None:
    assert [one.why for one in scan("# time: a lease\n\ntime.sleep(1)", "here")] == [""]
