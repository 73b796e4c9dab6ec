"""The overlapped loop and padded batches emit the same tokens as the plain loop, and the program of
a step never waits for the host."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import TINY_MODEL
from tandem.core.draft_shapes import chain_shapes
from tandem.core.identity import Identity
from tandem.core.request import ERROR, PREEMPTED, Request
from tandem.decode_node.planning.buckets import bucket_for, resolve_buckets
from tandem.decode_node.planning.states import GrantedSequence, RequestSize
from tandem.decode_node.planning.step_plan import SamplingTraits, StepKey
from tandem.decode_node.program.launcher import Launcher
from tandem.decode_node.program.step import StepShape, decode_step
from tandem.model.loaded import LoadedModel
from tandem.runtime.engine_loop import EngineLoop

Answers = dict[str, tuple[list[int], str | None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loops")
    tiny.write_tiny(path, seed=21)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder)


def mixed_requests(loaded: LoadedModel) -> list[Request]:
    """Return a batch with every kind of end and of sampling."""
    generator = torch.Generator().manual_seed(5)
    requests = []
    for i in range(9):
        length = int(torch.randint(1, 30, (1,), generator=generator))
        ids = torch.randint(5, 90, (length,), generator=generator).tolist()
        request = greedy(f"r{i}", ids, 4 + 5 * i, ignore_eos=i % 3 > 0, max_drafts=i % 4)
        sampling = request.sampling
        if i % 2:
            sampling = replace(sampling, temperature=0.9, seed=i, top_p=0.95)
        if i in (2, 3):
            sampling = replace(sampling, presence_penalty=0.7, min_tokens=4, logprobs=2)
        if i == 4:
            sampling = replace(sampling, stop_token_ids=(7, 19, 33, 41))
        requests.append(replace(request, sampling=sampling))
    return requests


def turns(bench: Bench, requests: list[Request]) -> Iterator[None]:
    """Yield after each engine step until all requests have ended. Requests enter as rows become
    free."""
    waiting = list(requests)
    while waiting or bench.decode.has_work():
        while waiting and len(bench.decode.scheduler.sequences) < bench.max_rows - 1:
            bench.start(waiting.pop(0))
        bench.decode.step()
        bench.decode.scheduler.check_integrity()
        yield


def answers_of(bench: Bench, requests: list[Request]) -> Answers:
    for _ in turns(bench, requests):
        pass
    answers: Answers = {}
    for update in bench.updates():
        name = update.identity.request_id
        ids, reason = answers.get(name, ([], None))
        assert reason is None, f"{name} went on after its end"
        wants = next(
            r for r in requests if r.request_id == update.identity.request_id
        ).sampling.logprobs
        assert len(update.logprobs) == (0 if wants is None else len(update.token_ids))
        answers[update.identity.request_id] = (ids + list(update.token_ids), update.finish_reason)
    bench.check_empty()
    return answers


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> Answers:
    return answers_of(Bench(loaded), mixed_requests(loaded))


@pytest.mark.parametrize(
    ("overlap", "buckets"),
    [
        (False, (2, 3)),
        (False, (4,)),
        (True, None),
        (True, (2, 3)),
        (True, (4,)),
    ],
)
def test_loops_and_buckets_emit_the_same(
    loaded: LoadedModel, plain: Answers, overlap: bool, buckets: tuple[int, ...] | None
) -> None:
    other = answers_of(Bench(loaded, overlap=overlap, buckets=buckets), mixed_requests(loaded))
    assert other == plain
    assert {reason for _, reason in plain.values()} == {"stop", "length"}


def test_overlapped_preemption_tells_everything_first(loaded: LoadedModel) -> None:
    """The emitted tokens of a preempted sequence are a prefix of its answer, without a gap."""
    requests = [greedy(f"r{i}", list(range(5, 25)), 60, ignore_eos=True) for i in range(3)]
    whole = answers_of(Bench(loaded), requests)
    bench = Bench(loaded, overlap=True, num_pages=24)
    for request in requests:
        bench.start(request)
    while bench.decode.has_work():
        bench.decode.step()
        bench.decode.scheduler.check_integrity()
    preempted = [u.identity.request_id for u in bench.updates() if u.finish_reason == PREEMPTED]
    assert preempted
    for name, (ids, _) in whole.items():
        told = [t for u in bench.updates() if u.identity.request_id == name for t in u.token_ids]
        assert told == ids[: len(told)] and (name in preempted or told == ids)
    bench.check_empty()


def test_who_has_ended_with_its_first_token_keeps_nobody_turning(loaded: LoadedModel) -> None:
    """A sequence that ended with its first token causes no steps. Its gateway knows the end, but
    may be late to drop it."""
    bench, identity, prompt = Bench(loaded), Identity("r"), list(range(5, 25))
    bench.decode.enqueue(identity, RequestSize(len(prompt), 0, 1))
    bench.decode.activate(identity, greedy("r", prompt, 1, ignore_eos=True), 7, None)
    assert not bench.decode.has_work()
    assert bench.decode.drop(identity)
    bench.check_empty()


def test_pages_stay_while_a_step_may_touch_them(loaded: LoadedModel) -> None:
    bench = Bench(loaded, overlap=True)
    bench.start(greedy("r", list(range(5, 25)), 60, ignore_eos=True))
    bench.decode.step()
    held = bench.num_pages - 1 - bench.pool.num_available
    assert bench.drop("r") and not bench.drop("r")
    assert bench.num_pages - 1 - bench.pool.num_available == held > 0
    bench.decode.scheduler.check_integrity()
    assert bench.decode.has_work()
    bench.decode.step()
    assert not bench.decode.has_work() and not bench.updates()
    bench.check_empty()


def test_a_step_that_fails_takes_along_the_one_on_its_way_and_keeps_nothing(
    loaded: LoadedModel,
) -> None:
    bench = Bench(loaded, overlap=True)
    names = [f"r{i}" for i in range(3)]
    for name in names:
        bench.start(greedy(name, list(range(5, 25)), 60, ignore_eos=True))
    bench.decode.step()
    with patch.object(Launcher, "launch", side_effect=RuntimeError("cosmic ray")):
        with pytest.raises(RuntimeError, match="cosmic ray") as failed:
            bench.decode.step()
        bench.decode.fail(failed.value)
    assert [u.identity.request_id for u in bench.updates() if u.finish_reason == ERROR] == names
    assert not bench.decode.has_work()
    bench.check_empty()
    [(ids, reason)] = bench.generate(greedy("next", list(range(5, 25)), 9, ignore_eos=True))
    assert (len(ids), reason) == (9, "length")


@pytest.mark.parametrize("overlap", [False, True])
def test_who_cannot_begin_is_in_no_step(loaded: LoadedModel, overlap: bool) -> None:
    """A sequence that could not be added to a row is in no step. The row may hold the previous
    owner's state. The sequence's pages are released when it is dropped."""
    bench = Bench(loaded, num_drafts=2, max_rows=3, overlap=overlap)
    beside = greedy("beside", [5, 6, 7], 12, ignore_eos=True)
    expected = Bench(loaded, num_drafts=2).generate(beside)
    first, _ = bench.start(beside)
    full, rows = Mock(side_effect=MemoryError("full")), bench.decode._launcher.rows
    with patch.object(rows, "add_row", full), pytest.raises(MemoryError):
        bench.start(greedy("late", [8, 9], 12, ignore_eos=True))
    late = bench.identities["late"]
    assert isinstance(bench.decode.scheduler.sequences[late], GrantedSequence)
    bench.frames.clear()
    while bench.decode.has_work():
        bench.decode.step()
        bench.decode.scheduler.check_integrity()
    assert {one.identity.request_id for one in bench.updates()} == {"beside"}
    tokens = [first, *(token for one in bench.updates() for token in one.token_ids)]
    assert tokens == expected[0][0]
    assert bench.decode.drop(late)
    bench.check_empty()


def test_an_end_that_is_certain_wastes_no_step(loaded: LoadedModel) -> None:
    bench = Bench(loaded, overlap=True, num_drafts=0)
    bench.start(greedy("r", list(range(5, 25)), 8, ignore_eos=True))
    programs = bench.decode.programs
    programs.run = counting = Mock(side_effect=programs.run)
    while bench.decode.has_work():
        bench.decode.step()
    assert counting.call_count == 7


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 4), (5, 6), (6, 6)])
def test_buckets_hold_their_rows(num_rows: int, size: int) -> None:
    assert bucket_for(num_rows, resolve_buckets((4, 1), 6, "cpu")) == size


def test_buckets_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decode.batch_sizes: \[0, 9\]"):
        resolve_buckets((0, 4, 9), 8, "cpu")


@pytest.mark.parametrize("max_rows", [1, 2, 7, 16, 20])
def test_default_buckets_of_a_gpu(max_rows: int) -> None:
    buckets = resolve_buckets(None, max_rows, "cuda")
    for num in range(1, max_rows + 1):
        assert num <= bucket_for(num, buckets) <= max(2 * num, num + 7)


def test_all_kernels_give_the_same_answers() -> None:
    answers = []
    for kernels in ("torch", "native"):
        loaded = load(TINY_MODEL, f"model.kernels={kernels}")
        assert loaded.kernels.name == kernels
        answers.append(answers_of(Bench(loaded), mixed_requests(loaded)))
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_step_is_one_graph_that_never_waits_for_the_host(folder: Path, num_drafts: int) -> None:
    """Reading a tensor on the host or a value-dependent shape would break the graph.

    Uses bfloat16, the only dtype in which grouped products are traced.
    tests/unit/test_fake_steps.py checks the same for all drafters in every run.
    """
    loaded = load(folder, "model.kernels=torch", "model.dtype=bfloat16")
    bench = Bench(loaded, num_drafts=num_drafts)
    for i, request in enumerate(mixed_requests(loaded)[:3]):
        bench.start(replace(request, sampling=replace(request.sampling, temperature=0.5 * i)))
    traits = SamplingTraits(all_greedy=False, has_logit_rules=True)
    key = StepKey(3, num_drafts, num_drafts + 1, traits)
    rows = bench.decode._launcher.rows.select(torch.arange(3), 5, traits)

    def program() -> torch.Tensor:
        output = decode_step(
            loaded, bench.caches, rows, key, StepShape(chain_shapes(2)[num_drafts], None)
        )
        return output.outcome.tokens_BE

    with torch.inference_mode():
        plain = program()
        captured = torch.compile(program, fullgraph=True, backend="eager", dynamic=False)
        assert torch.equal(captured(), plain)


def test_engines_end_before_what_they_run_on_ends() -> None:
    """Programs are closed before the gang ends, because graphs hold the gang's collectives."""
    loop, ended = EngineLoop("engine"), list[str]()
    loop.on_end(lambda: ended.append("gang"))
    loop.add(Mock(has_work=lambda: False, close=lambda: ended.append("programs")))
    loop.start()
    loop.stop()
    assert ended == ["programs", "gang"]


@pytest.mark.parametrize("fails", ["before", "within"])
def test_pages_of_a_step_that_failed_stay_until_the_device_has_ended(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Pages of a failed step stay allocated until the device has finished. It may still write to
    them, in that step or the one in flight."""
    bench = Bench(loaded, overlap=True)
    bench.start(greedy("r", list(range(5, 25)), 60, ignore_eos=True))
    bench.decode.step()
    free, free_at_end = bench.pool.num_available, list[int]()
    monkeypatch.setattr(
        "tandem.decode_node.engine.synchronize",
        lambda device: free_at_end.append(bench.pool.num_available),
    )
    broken = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    where = bench.decode.programs if fails == "within" else bench.decode
    monkeypatch.setattr(where, "run" if fails == "within" else "_launch", broken)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        bench.decode.step()
    bench.decode.fail(caught.value)
    assert free_at_end == [free] and bench.pool.num_available > free
    bench.check_empty()


def test_what_fails_to_end_keeps_nobody_else_from_ending() -> None:
    loop, ended = EngineLoop("engine"), list[str]()
    loop.on_end(Mock(side_effect=RuntimeError("cosmic ray")))
    loop.on_end(lambda: ended.append("gang"))
    loop.start()
    loop.stop()
    assert ended == ["gang"] and not loop.is_running
