"""``tandem bench`` over the real gRPC server, with a gateway that only echoes."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from tandem import AsyncClient
from tandem.cluster.bench.experiment import Trial
from tandem.cluster.bench.options import BenchOptions
from tandem.cluster.bench.runner import LoadGenerator, Run
from tandem.cluster.bench.stats import Slo, acceptance, measure
from tandem.cluster.bench.workload import Job
from tandem.core.answer import Delta, Finished
from tandem.core.errors import Overloaded, RankLost
from tandem.core.request import Request
from tests.integration.echo_gateway import EchoGateway, echo_server
from tests.integration.test_cli_edge import serving, tandem
from tests.waiting import until

SMALL = ("--prompt-tokens", "3:8", "--output-tokens", "5:9", "--num-requests", "6")
JOBS = [Job((5, 6, 7, i), 8) for i in range(6)]
FOR_EVER = 60.0


class CountingGateway(EchoGateway):
    """Records the maximum number of concurrent requests."""

    def __init__(self) -> None:
        super().__init__()
        self.num_running = self.most_running = 0

    async def generate(
        self, request: Request, aborted: asyncio.Event
    ) -> AsyncGenerator[Delta | Finished, None]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            async for piece in super().generate(request, aborted):
                yield piece
        finally:
            self.num_running -= 1


@pytest.fixture
async def gateway() -> CountingGateway:
    return CountingGateway()


@pytest.fixture
async def client(gateway: CountingGateway) -> AsyncIterator[AsyncClient]:
    async with (
        echo_server(gateway) as server,
        AsyncClient(server.address, retry_s=0) as client,
    ):
        yield client


def generator(client: AsyncClient, **options: object) -> LoadGenerator:
    return LoadGenerator(client, options, lambda: None)  # type: ignore[arg-type]


async def closed(client: AsyncClient, concurrency: int, **options: object) -> Run:
    return await generator(client, **options).closed_loop(JOBS, concurrency, FOR_EVER)


async def test_a_closed_loop_keeps_its_concurrency(
    client: AsyncClient, gateway: CountingGateway
) -> None:
    gateway.hold_after = 2
    running = asyncio.create_task(closed(client, 3))
    await until(lambda: gateway.num_running == 3)
    gateway.go_on.set()
    run = await running
    assert gateway.most_running == 3 and len(gateway.requests) == 6
    assert all(record.error is None and record.due_s == record.sent_s for record in run.records)


async def test_an_open_loop_does_not_wait_for_answers(
    client: AsyncClient, gateway: CountingGateway
) -> None:
    gateway.hold_after = 0
    loop = generator(client).open_loop(JOBS, [0.001 * i for i in range(6)], FOR_EVER)
    running = asyncio.create_task(loop)
    await until(lambda: gateway.num_running == 6)
    gateway.go_on.set()
    assert (await running).num_not_sent == 0


async def test_latency_counts_from_the_schedule_and_the_lag_is_told(client: AsyncClient) -> None:
    """All requests were due seven seconds ago, so a generator that lags must not look fast."""
    run = await generator(client).open_loop(JOBS, [-7.0] * 6, FOR_EVER)
    found = measure([run], Slo(ttft_ms=6999))
    assert found.lag_ms is not None and found.lag_ms.p50 >= 7000
    assert found.ttft_ms is not None and found.ttft_ms.p50 >= found.lag_ms.p50
    assert found.tpot_ms is not None and found.tpot_ms.p99 < 7000
    assert (found.num_ok, found.goodput_per_s) == (6, 0)


async def test_every_token_and_the_counts_arrive(client: AsyncClient) -> None:
    run = await closed(client, 2)
    for record in run.records:
        assert [num for _, num in record.messages] == [2, 2, 2, 2]
        times_s = [at_s for at_s, _ in record.messages]
        assert times_s == sorted(times_s) and times_s[-1] <= record.end_s
    found = measure([run], Slo())
    assert (found.num_prompt_tokens, found.num_output_tokens) == (24, 48)
    assert found.kv_bytes == 60
    assert acceptance(run.records).per_position == (1, 1, 0)


async def test_failures_are_counted_by_code_and_stop_nothing(
    client: AsyncClient, gateway: CountingGateway
) -> None:
    gateway.failures = [
        (0, Overloaded("full", 1.0)),
        (4, KeyError("oops")),
        (2, RankLost("gone")),
    ]
    run = await closed(client, 1)
    found = measure([run], Slo())
    assert found.errors == {"RESOURCE_EXHAUSTED": 1, "INTERNAL": 1, "UNAVAILABLE": 1}
    assert (found.num_ok, found.num_sent) == (3, 6)
    assert len(gateway.requests) == 6, "a failed request is not retried"
    assert [record.code is None for record in run.records] == [False] * 3 + [True] * 3


async def test_a_request_that_takes_too_long_fails_alone(
    client: AsyncClient, gateway: CountingGateway
) -> None:
    gateway.hold_after = 2
    run = await closed(client, 6, timeout_s=2.0)  # time: a deadline, which begun answers meet
    assert measure([run], Slo()).errors == {"DEADLINE_EXCEEDED": 6}
    assert all(record.messages for record in run.records)


async def test_what_cannot_even_be_encoded_is_a_failure_too(client: AsyncClient) -> None:
    jobs = [Job((1 << 40,), 4), Job((5,), 4)]
    run = await generator(client).closed_loop(jobs, 1, FOR_EVER)
    assert [record.code for record in run.records] == ["INVALID_ARGUMENT", None]


async def test_an_aborted_answer_is_a_failure(
    client: AsyncClient, gateway: CountingGateway
) -> None:
    gateway.hold_after = 2
    running = asyncio.create_task(closed(client, 6))
    await until(lambda: gateway.num_running == 6)
    await client.abort(gateway.requests[0].request_id)
    gateway.go_on.set()
    assert measure([await running], Slo()).errors == {"ABORTED": 1}


async def test_nothing_is_sent_when_the_time_is_up(
    client: AsyncClient, gateway: CountingGateway
) -> None:
    run = await generator(client).closed_loop(JOBS, 2, 0.0)
    assert (run.records, run.num_not_sent) == ((), 6)
    run = await generator(client).open_loop(JOBS, [0, 0, 0, 5, 6, 7], 4.0)
    assert (len(run.records), run.num_not_sent, len(gateway.requests)) == (3, 3, 3)


async def test_compared_arms_take_turns_over_the_same_prompts(
    client: AsyncClient, gateway: CountingGateway
) -> None:
    options = BenchOptions(
        compare_drafts="0,3",
        num_requests=4,
        warm_up=1,
        concurrency=1,
        prompt_tokens="3:8",
        output_tokens="2:4",
        temperature=0.5,
        seed=9,
        ignore_eos=True,
    )
    progress = Progress(console=Console(quiet=True))
    arms = await Trial(client, await client.model_info(), options, progress).run()
    seen = gateway.requests
    drafts = [request.speculation.max_drafts for request in seen]
    assert drafts == [0, 3] + [0, 0, 3, 3] + [3, 3, 0, 0]
    prompts = [request.prompt_ids for request in seen]
    assert prompts[2:4] == prompts[4:6] and prompts[6:8] == prompts[8:10]
    assert len({*prompts}) == 5, "the two rounds and the warm-up differ"
    assert {request.sampling.seed for request in seen} == {9, 10}
    assert all(r.sampling.ignore_eos and r.sampling.temperature == 0.5 for r in seen)
    assert [len(arm.records) for arm in arms] == [4, 4]
    assert [task.completed for task in progress.tasks] == [1, 1, 2, 2, 2, 2]


async def test_a_warm_up_does_not_send_the_trace(
    client: AsyncClient, gateway: CountingGateway, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_ids": [9, 8], "max_tokens": 2}\n')
    options = BenchOptions(workload="trace", trace=path, warm_up=2, prompt_tokens="3")
    options = replace(options, output_tokens="2")
    progress = Progress(console=Console(quiet=True))
    await Trial(client, await client.model_info(), options, progress).run()
    assert [len(request.prompt_ids) for request in gateway.requests] == [3, 3, 2]


async def test_a_rounds_schedule_begins_where_the_last_one_ended(client: AsyncClient) -> None:
    path_options = BenchOptions(num_requests=4, rate=50.0, prompt_tokens="3", output_tokens="2")
    options = replace(path_options, compare_drafts="0,1", warm_up=0)
    progress = Progress(console=Console(quiet=True))
    arms = await Trial(client, await client.model_info(), options, progress).run()
    first, second = (run.records for run in arms[0].runs)
    gaps = [first[0].due_s, first[1].due_s - first[0].due_s]
    gaps += [second[0].due_s, second[1].due_s - second[0].due_s]
    single = await Trial(client, await client.model_info(), path_options, progress).run()
    due = [0.0, *(record.due_s for record in single[0].records)]
    assert gaps == pytest.approx([b - a for a, b in zip(due, due[1:], strict=False)])


# The command as a process


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (_, address):
        yield address


def test_the_json_is_the_last_line_and_the_file(address: str, tmp_path: Path) -> None:
    files = ("--output", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png"))
    done = tandem("bench", "--address", address, *SMALL, "--json", *files)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "x.json").read_text())
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    run = report["runs"][0]
    assert run["metrics"]["num_ok"] == run["metrics"]["num_sent"] == 6
    assert run["metrics"]["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert run["acceptance"]["per_position"] == [1, 1, 0]
    assert report["options"]["prompt_tokens"] == "3:8" and report["model"]["name"] == "echo"
    assert "round 1" in done.stderr


def test_the_table_has_the_figures_and_the_model(address: str) -> None:
    done = tandem("bench", "--address", address, *SMALL, "--rate", "500", "--cost-ratio", "0.25")
    assert done.returncode == 0, done.stderr
    for word in (
        "time to first token",
        "between tokens",
        "6 answers",
        "failed none",
        "100.0% 100.0%",
    ):
        assert word in done.stdout
    # a = 1 at position 1 and three drafts: 4 / (3 * 0.25 + 1)
    assert "2.29" in next(
        x for x in done.stdout.splitlines() if "modelled speed-up, position 1" in x
    )


def test_a_trace_of_text_is_sent_as_it_is(address: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "abc", "max_tokens": 3, "arrival_s": 9}\n' * 2)
    trace = ("--workload", "trace", "--trace", str(path), "--warm-up", "0")
    done = tandem("bench", "--address", address, "--json", *trace)
    metrics = json.loads(done.stdout)["runs"][0]["metrics"]
    assert (metrics["num_prompt_tokens"], metrics["num_output_tokens"]) == (8, 6)


def test_more_drafts_than_the_server_makes_are_refused_first(address: str) -> None:
    for args in (("--compare-drafts", "0,4"), ("--max-drafts", "4")):
        done = tandem("bench", "--address", address, *SMALL, *args)
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            "INVALID_ARGUMENT: 4 drafts per step are too many: this server makes at most 3"
            in done.stderr
        )


def test_when_every_request_fails_the_code_is_told(address: str) -> None:
    done = tandem("bench", "--address", address, *SMALL, "--temperature", "-1")
    assert done.returncode == 1 and "failed 6 INVALID_ARGUMENT" in done.stdout
    assert "error: INVALID_ARGUMENT: 6 of 6 requests failed" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--address", "127.0.0.1:1"], "error: UNAVAILABLE: "),
        (["--address", "10.0.0.7:50051"], "is another machine; add --allow-remote"),
        (["--rate", "1", "--concurrency", "1"], "cannot be combined with --concurrency"),
        (["--launch", "--set", "kv.page=1"], "did you mean 'kv.page_size'?"),
        (["--set", "a=b"], "add --launch"),
        (["--workload", "trace"], "--trace=None: use it together with --workload trace"),
    ],
)
def test_a_mistake_is_told_on_stderr(args: list[str], message: str) -> None:
    done = tandem("bench", *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_it_can_start_a_cluster_of_its_own() -> None:
    done = tandem("bench", "--launch", *SMALL, "--set", "mode=colocated", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["runs"][0]["metrics"]["num_ok"] == 6
    assert "launching colocated" in done.stderr


def test_help_teaches_by_example() -> None:
    done = tandem("bench", "--help")
    assert done.returncode == 0 and "tandem bench --rate 4" in done.stdout
