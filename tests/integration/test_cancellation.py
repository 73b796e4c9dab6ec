"""A request that is ended at any time, in any way, leaves both nodes within one step of each.

The test uses real gRPC, nodes and channels. Engines run only the steps that the test triggers, so
each phase is held until the request has been ended in it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.exact import near_ties
from tandem.core.tasks import cancel_and_wait
from tandem.decode_node.service.rank import DecodeRank
from tandem.kv_transfer.pages import PagePool
from tandem.kv_transfer.peer_link import MAX_CHUNKS_PER_LINK
from tandem.prefill_node.rank import PrefillRank
from tests.scene import Scene, prompts, scene
from tests.waiting import until

WAYS = ("drop", "abort", "deadline")
DEADLINES_S = 0.02, 0.1, 8.0, 32.0
"""Deadlines of the request. It must reach the phase before the deadline, and the phase lasts until
the deadline has passed. A machine that is too slow for one deadline tries the next."""
MAX_STEPS = 2
"""Steps that each engine may take from learning of the end until nothing of the request is left."""
VICTIM, AHEAD = "victim", "ahead"
Phase = Callable[[Scene], Awaitable[None]]


def deadlines_s(way: str) -> tuple[float | None, ...]:
    return DEADLINES_S if way == "deadline" else (None,)


async def is_reached(at: Scene, phase: Awaitable[None]) -> bool:
    """Wait for the phase; return False if the deadline passed first."""
    reaching = asyncio.ensure_future(phase)
    both = reaching, at.streams[VICTIM].task
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if reaching.done() and not both[1].done():
        reaching.result()
        return True
    assert both[1].result() == "DEADLINE_EXCEEDED"
    await cancel_and_wait(reaching)
    return False


async def queued(at: Scene) -> None:
    """All rows are taken; the request waits at the decode node."""
    await until(lambda: at.waits(VICTIM), at.answer)


async def asking(at: Scene) -> None:
    """The request waits for a row while the decode engine is in the middle of a step."""
    [decode] = at.cluster.decodes
    await until(lambda: decode._pending_grants and at.decode.is_asked)


async def without_decode_pages(at: Scene) -> None:
    """A row is free but too few pages are; the request waits."""
    await until(lambda: at.waits(VICTIM), at.answer)
    assert at.cluster.decodes[0].engine.scheduler._free_rows


async def without_prefill_pages(at: Scene) -> None:
    """The decode node waits to pull a prompt for which the prefill node has no pages yet."""
    scheduler = at.cluster.prefills[0].engine.scheduler
    await until(lambda: scheduler.num_queued, at.answer)
    assert at.holds_a_row(VICTIM)


async def behind_another(at: Scene) -> None:
    """The prompt is queued after another request's prompt, and the pull waits too."""
    await until(lambda: at.prefill_sequence(VICTIM), at.answer)
    sequence = at.prefill_sequence(VICTIM)
    assert sequence is not None and sequence.num_computed == 0
    await until(lambda: at.has_begun(VICTIM), at.answer)


async def amid_its_prompt(at: Scene) -> None:
    """Some chunks of the prompt are computed."""

    def is_there() -> bool:
        sequence = at.prefill_sequence(VICTIM)
        return sequence is not None and sequence.num_computed >= 32

    await until(is_there, at.prefill_on)
    await until(lambda: at.has_begun(VICTIM), at.answer)
    await until(lambda: at.prefill.is_held, at.yield_thread)
    sequence = at.prefill_sequence(VICTIM)
    assert sequence is not None and sequence.num_left > 0


async def before_the_pull(at: Scene) -> None:
    """The first token is out; the channel is busy with another pull."""
    [link] = at.cluster.decodes[0].kv_receiver._links.values()
    for _ in range(MAX_CHUNKS_PER_LINK):
        await link._slots.acquire()
        at.undo.append(link._slots.release)
    await until(lambda: at.streams[VICTIM].tokens, at.prefill_on)
    arriving = at.cluster.decodes[0]._arrivals
    await until(lambda: any(identity.request_id == VICTIM for identity in arriving))


async def on_the_wire(at: Scene) -> None:
    """Bytes are being sent when the request ends."""
    [(_, line)] = at.cluster.prefills[0].source._channels._accepted.values()
    channel = await line.channel()
    post, goes_on = channel._transport.post, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*transfer: object) -> object:
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result()
        return post(*transfer)

    channel._transport.post = slow
    at.undo.append(goes_on.set)
    staging = at.cluster.prefills[0].source._endpoint.staging
    await until(lambda: at.streams[VICTIM].tokens and staging.num_taken, at.prefill_on)


async def decoding(at: Scene) -> None:
    await until(lambda: len(at.streams[VICTIM].tokens) >= 4, lambda: at.decode_on(VICTIM))


async def preempted(at: Scene) -> None:
    """The request was preempted for an older one. It waits to resume and holds nothing."""

    def has_run() -> bool:
        return at.holds_a_row(VICTIM) and len(at.streams[VICTIM].tokens) > 1

    await until(has_run, lambda: at.decode_on(VICTIM))
    await until(lambda: at.waits(VICTIM), lambda: at.decode_on(VICTIM))


PHASES: list[tuple[Phase, tuple[str, ...]]] = [
    (queued, ("decode.max_num_seqs=1",)),
    (asking, ()),
    (without_decode_pages, ()),
    (without_prefill_pages, ()),
    (behind_another, ("decode.max_num_seqs=3",)),
    (amid_its_prompt, ()),
    (before_the_pull, ()),
    (on_the_wire, ()),
    (decoding, ()),
    (preempted, ()),
]
OTHER_NODES: list[tuple[Phase, tuple[str, ...]]] = [
    (amid_its_prompt, ("mode=colocated",)),
    (decoding, ("decode.overlap=true",)),
    (decoding, ("mode=colocated",)),
    (preempted, ("decode.overlap=true",)),
]
"""All ways to end a request merge before they reach a node. In these phases, one way is enough when
time is short."""
CASES = [(*phase, way) for phase in PHASES for way in WAYS] + [
    pytest.param(*phase, way, marks=[pytest.mark.slow] if way != "abort" else [])
    for phase in OTHER_NODES
    for way in WAYS
]


async def prepare(at: Scene, phase: Phase) -> None:
    """Take pages away, or send a long prompt ahead, where the phase needs it."""
    prefill, decode = at.cluster.prefills[0], at.cluster.decodes[0]
    if phase is behind_another:
        at.ask(AHEAD, prompts(1, 100)[0], 4)
        await until(lambda: at.prefill_sequence(AHEAD) and at.prefill.is_held, at.answer)
    if phase is without_prefill_pages:
        await leave_pages(at, prefill, 5)
    if phase is without_decode_pages:
        await leave_pages(at, decode, 5)
    if phase is preempted:
        await leave_pages(at, decode, 14)


async def leave_pages(at: Scene, rank: PrefillRank | DecodeRank, num_left: int) -> None:
    """Take a rank's free pages except ``num_left`` until the phase is over."""
    pool: PagePool = rank.pool
    taken: list[int] = []
    posted = rank.loop.post(lambda: taken.extend(pool.allocate(pool.num_available - num_left)))
    await until(posted.done, at.answer)
    at.undo.append(lambda: rank.loop.post(lambda: pool.release(taken)))


@pytest.mark.parametrize(
    ("phase", "sets", "way"),
    CASES,
    ids=lambda p: p.__name__ if callable(p) else p if isinstance(p, str) else " ".join(p),
)
async def test_an_ended_request_is_gone_after_a_step(
    small_model: Path, phase: Phase, sets: tuple[str, ...], way: str
) -> None:
    for deadline_s in deadlines_s(way):
        if await is_ended_in(small_model, phase, sets, way, deadline_s):
            return
    raise AssertionError(f"{phase.__name__} is not reached in {DEADLINES_S[-1]} s")


async def is_ended_in(
    path: Path, phase: Phase, sets: tuple[str, ...], way: str, deadline_s: float | None
) -> bool:
    """Return False if the deadline passed before the phase; nothing may be left in that case
    either."""
    async with scene(path, *sets) as at:
        await prepare(at, phase)
        at.ask(VICTIM, prompts(1, 60)[0], 30, timeout_s=deadline_s)
        if not await is_reached(at, phase(at)):
            del at.streams[VICTIM]
            await go_on(at)
            return False
        before = at.prefill.num_given, at.decode.num_given
        num_told = at.to_decode.told["abort"]
        await at.end(VICTIM, way)
        await until(lambda: at.to_decode.told["abort"] > num_told)
        await until(lambda: not at.is_held(VICTIM), at.answer)
        assert at.prefill.num_given - before[0] <= MAX_STEPS
        assert at.decode.num_given - before[1] <= MAX_STEPS
        ended = at.streams.pop(VICTIM).task
        await asyncio.wait([ended])
        end = "dropped" if ended.cancelled() else ended.result()
        assert end == {"drop": "dropped", "abort": "abort", "deadline": "DEADLINE_EXCEEDED"}[way]
        await go_on(at)
        return True


async def go_on(at: Scene) -> None:
    """Check that all other requests finish exactly and nothing is left."""
    for undo in at.undo:
        undo()
    at.prefill.open()
    at.decode.open()
    for stream in at.streams.values():
        assert await stream.task == "length"
        assert not near_ties(at.cluster.config.model.path, stream.ids, stream.tokens)
    await at.cluster.check_empty()


@pytest.mark.parametrize("way", WAYS)
async def test_all_answers_of_an_ended_request_are_gone(small_model: Path, way: str) -> None:
    """Both answers of a request with n = 2 are on the nodes as separate sequences."""
    [deadline_s] = deadlines_s(way)[1:2] or [None]
    async with scene(small_model, "decode.max_num_seqs=3") as at:
        at.ask(VICTIM, prompts(1, 20)[0], 30, timeout_s=deadline_s, num_answers=2)
        await until(lambda: at.on_decode(VICTIM, 2), at.prefill_on)
        await at.end(VICTIM, way)
        await until(lambda: not at.is_held(VICTIM), at.prefill_on)
        await asyncio.wait([at.streams.pop(VICTIM).task])
        await go_on(at)


async def test_who_is_ended_twice_keeps_its_pages_until_nothing_writes_them(
    small_model: Path,
) -> None:
    """An abort may arrive twice, or together with a sweep."""
    async with scene(small_model) as at:
        [decode] = at.cluster.decodes
        caches, goes_on = decode.kv_receiver._endpoint.caches, threading.Event()
        scatter, writing = caches.scatter, []

        def slow(*given: Any) -> None:
            writing.append(given)
            goes_on.wait()
            scatter(*given)

        caches.scatter = slow
        at.ask(VICTIM, prompts(1, 60)[0], 30)
        await until(lambda: writing, at.prefill_on)
        [identity] = decode._arrivals
        ends = [asyncio.create_task(decode._abort(identity)) for _ in range(2)]
        try:
            for _ in range(MAX_STEPS):
                await until(lambda: at.decode.is_held)
                at.decode.give()
            assert at.holds_a_row(VICTIM) and not any(one.done() for one in ends)
        finally:
            goes_on.set()
        await until(lambda: all(one.done() for one in ends), at.answer)
        assert not at.holds_a_row(VICTIM)
        at.streams.pop(VICTIM).task.cancel()
        await until(lambda: not at.is_held(VICTIM), at.answer)
        await go_on(at)
