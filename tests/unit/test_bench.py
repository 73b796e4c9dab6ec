"""Calculations of the load generator: arrivals, workloads, statistics, the model of drafting."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from tandem.cluster.bench import compare, speculation
from tandem.cluster.bench import options as options_module
from tandem.cluster.bench.arrivals import arrival_times_s
from tandem.cluster.bench.experiment import arm_of, due_times_s, speedups
from tandem.cluster.bench.node_use import NodeUsage
from tandem.cluster.bench.options import BenchOptions, is_loopback
from tandem.cluster.bench.plot import save_plot
from tandem.cluster.bench.runner import Record, Run
from tandem.cluster.bench.stats import Distribution, Slo, acceptance, measure, tpot_ms
from tandem.cluster.bench.workload import Job, RandomLengths, parse_range, random_jobs, trace_jobs
from tandem.cluster.cli import app
from tandem.core.answer import Finished, SpeculationCounts, Timings, TransferStats, Usage
from tandem.core.info import ModelInfo, RankStatus, ServerStatus

MODEL = ModelInfo("tiny", "DeepseekV3ForCausalLM", 200, 20, (3, 7), 3, True, "float32")


def answer(
    num_tokens: int = 7, num_steps: int = 3, num_drafts: int = 3, accepted: tuple[int, ...] = (2, 1)
) -> Finished:
    """Return an answer of ``num_steps`` steps with ``num_drafts`` drafts; 4 of 10 prompt tokens
    were cached."""
    drafted = (num_steps,) * num_drafts
    counts = SpeculationCounts(num_steps, sum(drafted), sum(accepted), accepted, 0, drafted)
    stats = TransferStats(1000, 10, "gloo", 0.5)
    return Finished(0, "length", Usage(10, 4, num_tokens), counts, Timings(), stats, 0)


def record(*gaps_ms: float, tokens: int = 1, due_s: float = 0.0, steps: int = 3) -> Record:
    """Return a request sent 10 ms late. All messages but the first have ``tokens`` tokens."""
    at_s, messages = due_s, []
    for i, gap in enumerate(gaps_ms):
        at_s += gap / 1e3
        messages.append((at_s, tokens if i else 1))
    num = sum(num for _, num in messages)
    return Record(due_s, due_s + 0.01, at_s, tuple(messages), answer(num, steps, 0, ()))


# Arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variance_of_their_gamma(burstiness: float) -> None:
    gaps = np.diff([0.0, *arrival_times_s(40_000, 5.0, burstiness, seed=1)])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.04)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.08)


def test_burstiness_1_is_poisson() -> None:
    gaps = np.sort(np.diff([0.0, *arrival_times_s(20_000, 3.0, seed=2)]))
    below = 1 - np.exp(-3.0 * gaps)
    distance = np.abs(below - (np.arange(gaps.size) + 0.5) / gaps.size).max()
    assert distance < 1.63 / math.sqrt(gaps.size)  # Kolmogorov-Smirnov at 1 %
    counts = np.histogram(np.cumsum(np.diff(arrival_times_s(20_000, 3.0, seed=3))), 2000)[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)


def test_arrivals_are_a_function_of_the_seed() -> None:
    assert arrival_times_s(9, 2.0, 0.5, 4) == arrival_times_s(9, 2.0, 0.5, 4)
    assert arrival_times_s(9, 2.0, 0.5, 4) != arrival_times_s(9, 2.0, 0.5, 5)
    assert arrival_times_s(5, 2.0, 0.5, 4) == arrival_times_s(9, 2.0, 0.5, 4)[:5]


# The model of speculative decoding


@pytest.mark.parametrize(
    ("share", "num_drafts", "length"),
    [(0.6, 2, 1.96), (0.7, 3, 2.533), (0.8, 2, 2.44), (0.8, 5, 3.68928), (0.9, 10, 6.86189404)],
)
def test_published_values(share: float, num_drafts: int, length: float) -> None:
    """Values of table 1 of Leviathan et al. 2023, where drafts are free."""
    assert speculation.expected_length(share, num_drafts) == pytest.approx(length, rel=1e-4)
    closed_form = (1 - share ** (num_drafts + 1)) / (1 - share)
    assert speculation.speedup(share, num_drafts, 0.0) == pytest.approx(closed_form)
    assert speculation.fitted_acceptance(length, num_drafts) == pytest.approx(share, rel=1e-4)


def test_the_ends_of_the_model() -> None:
    assert speculation.expected_length(1.0, 3) == 4
    assert speculation.expected_length(0.0, 3) == 1
    assert speculation.speedup(0.0, 3, 0.2) == pytest.approx(1 / 1.6)
    assert speculation.fitted_acceptance(0.9, 3) == 0
    assert speculation.fitted_acceptance(4.0, 3) == pytest.approx(1)
    assert speculation.fitted_acceptance(1.0, 0) is None
    assert speculation.cost_ratio(13.0, 10.0, 3) == pytest.approx(0.1)


# Statistics


@pytest.mark.parametrize("num", [1, 2, 5, 1000])
def test_percentiles_are_numpys(num: int) -> None:
    values = np.random.default_rng(num).exponential(size=num)
    found = Distribution.of(values)
    assert found is not None
    expected = (values.mean(), *np.percentile(values, (50, 90, 99)))
    assert (found.mean, found.p50, found.p90, found.p99) == pytest.approx(expected)
    assert Distribution.of([]) is None


def test_latencies_count_from_when_the_request_was_due() -> None:
    found = measure([Run((record(100, 50, 30, 40, tokens=2, due_s=5.0),), 0)], Slo())
    assert found.ttft_ms is not None and found.ttft_ms.mean == pytest.approx(100)
    assert found.e2e_ms is not None and found.e2e_ms.mean == pytest.approx(220)
    assert found.lag_ms is not None and found.lag_ms.mean == pytest.approx(10)
    assert found.tpot_ms is not None and found.tpot_ms.mean == pytest.approx(20)
    assert found.itl_message_ms is not None and found.itl_message_ms.mean == pytest.approx(40)
    assert found.itl_token_ms is not None and found.itl_token_ms.p50 == pytest.approx(20)
    assert found.step_ms == pytest.approx(35)


def test_gaps_per_token_weigh_each_token_alike() -> None:
    one = replace(record(10), messages=((0.01, 1), (0.04, 3), (0.06, 1)))
    found = measure([Run((one,), 0)], Slo()).itl_token_ms
    assert found is not None and (found.mean, found.p50) == pytest.approx((12.5, 10))
    found = measure([Run((one,), 0)], Slo()).itl_message_ms
    assert found is not None and (found.mean, found.p50) == pytest.approx((25, 25))


def test_throughput_is_over_all_runs_and_failures_are_left_out() -> None:
    failed = Record(0.0, 0.0, 2.0, ((0.5, 1),), None, "UNAVAILABLE: gone: for good")
    runs = [Run((record(1000, 1000), failed), 1), Run((record(1000, 1000, 1000),), 2)]
    found = measure(runs, Slo())
    assert (found.num_ok, found.num_sent, found.num_not_sent) == (2, 3, 3)
    assert found.errors == {"UNAVAILABLE": 1}
    assert found.duration_s == pytest.approx(5)
    assert found.requests_per_s == found.goodput_per_s == pytest.approx(0.4)
    assert found.output_tokens_per_s == pytest.approx(1)
    assert found.input_tokens_per_s == pytest.approx(4)
    assert (found.num_prompt_tokens, found.num_cached_tokens) == (20, 8)
    assert found.kv_bytes == 2000


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (Slo(), 3),
        (Slo(ttft_ms=100), 2),
        (Slo(tpot_ms=20), 2),
        (Slo(ttft_ms=100, tpot_ms=20), 1),
        (Slo(ttft_ms=1), 0),
    ],
)
def test_goodput_counts_what_keeps_every_bound(slo: Slo, num_good: int) -> None:
    failed = replace(record(50, 10), error="INTERNAL: x")
    records = (record(100), record(99, 30), record(200, 10), failed)
    run = Run(records, 0)
    assert measure([run], slo).goodput_per_s * run.duration_s == pytest.approx(num_good)


def test_nothing_sent_gives_nothing_but_no_error() -> None:
    found = measure([Run((), 4)], Slo())
    assert (found.num_sent, found.requests_per_s, found.ttft_ms) == (0, 0, None)
    assert tpot_ms(record(5)) is None


def test_acceptance_divides_by_what_was_drafted_at_each_position() -> None:
    """Two requests draft 3 tokens and one drafts 1, so position 1 was drafted in 10 steps."""
    answers = [answer(9, 4, 3, (3, 1, 0)), answer(5, 2, 3, (1, 1, 0)), answer(7, 4, 1, (2,))]
    records = [Record(0.0, 0.0, 1.0, (), one) for one in answers]
    failed = Record(0.0, 0.0, 1.0, (), answer(99, 1, 3, (1, 1, 1)), "INTERNAL: x")
    found = acceptance([*records, failed])
    assert (found.num_drafts, found.num_steps) == (3, 10)
    assert found.per_position == pytest.approx((6 / 10, 2 / 6, 0))
    assert found.first == pytest.approx(0.6)
    assert found.accepted_length == pytest.approx((8 + 4 + 6) / 10)
    assert found.fitted == pytest.approx(speculation.fitted_acceptance(1.8, 3))
    # Position 2 was tried after 3 and 1 accepted drafts, position 3 after 1 and 1.
    assert found.alpha == pytest.approx(8 / (10 + 4 + 2))


def test_the_hosts_share_is_what_the_program_leaves_of_a_step() -> None:
    def nodes(num_steps: int, step_s: float, program_s: float) -> ServerStatus:
        prefill = RankStatus("prefill-0", "prefill", 1, True, counters={"num_steps": 99})
        counters = {"num_steps": num_steps, "step_s": step_s, "program_s": program_s}
        decode = RankStatus("decode-0", "decode", 1, True, counters=counters | {"num_preempted": 2})
        return ServerStatus("SERVING", "disaggregated", 0, (prefill, decode, decode))

    before, after = NodeUsage.of(nodes(10, 5.0, 4.0)), NodeUsage.of(nodes(20, 7.0, 5.5))
    use = after.since(before)
    assert (use.num_steps, use.num_preempted) == (20, 0)
    assert use.host_share == pytest.approx(0.25) and use.step_ms == pytest.approx(200)
    reborn = NodeUsage.of(nodes(1, 0.1, 0.1)).since(after)
    assert reborn == NodeUsage() and reborn.host_share is None and reborn.step_ms is None
    runs = [Run((), 0, use), Run((), 0, use)]
    assert measure(runs, Slo()).use == NodeUsage(40, 8.0, 6.0, 0)


def test_answers_without_steps_or_drafts_have_no_acceptance() -> None:
    found = acceptance([Record(0.0, 0.0, 1.0, (), answer(1, 0, 0, ()))])
    assert (found.accepted_length, found.first, found.fitted) == (None, None, None)
    assert found.alpha is None
    assert found.per_position == ()


def test_the_model_stands_beside_the_measurement() -> None:
    """Compare steps of 10 ms without drafts and steps of 13 ms with 3 drafts and 2 tokens each."""
    plain = replace(record(5, *[10] * 4), finished=answer(5, 4, 0, ()))
    drafted = replace(record(5, *[13] * 4, tokens=2), finished=answer(9, 4, 3, (3, 1, 0)))
    arms = [arm_of(0, [Run((plain,), 0)], Slo()), arm_of(3, [Run((drafted,), 0)], Slo())]
    base, found = speedups(arms, None)
    assert found.cost_ratio == pytest.approx(0.1)
    assert found.measured == pytest.approx(10 / 6.5)
    assert found.measured_per_round == pytest.approx((10 / 6.5,))
    assert found.model_fitted == pytest.approx(2 / 1.3)
    assert found.model_first == pytest.approx(speculation.speedup(0.75, 3, 0.1))
    assert (base.measured, base.model_first) == (1, None)
    assert (base.operations, base.reads) == (1, 1)
    assert found.operations == pytest.approx((3 + 1) / 2) and found.reads == pytest.approx(2)
    assert speedups(arms, None, 0.1)[1].operations == pytest.approx((3 * 1.1 + 1) / 2)
    given = speedups(arms[1:], 0.2)[0]
    assert given.model_fitted == pytest.approx(2 / 1.6) and given.measured is None
    assert speedups(arms[1:], None)[0].model_fitted is None


# Workloads


def test_random_prompts_fill_their_ranges() -> None:
    jobs = random_jobs(MODEL, 400, RandomLengths((2, 5), (1, 3)), 0)
    assert {len(job.prompt) for job in jobs} == {2, 3, 4, 5}
    assert {job.max_tokens for job in jobs} == {1, 2, 3}
    tokens = {token for job in jobs for token in job.prompt}
    assert tokens == set(range(20)) - {3, 7}
    assert jobs == random_jobs(MODEL, 400, RandomLengths((2, 5), (1, 3)), 0)
    assert jobs != random_jobs(MODEL, 400, RandomLengths((2, 5), (1, 3)), 1)


def test_prefixes_are_shared_and_a_warm_up_shares_them_too() -> None:
    shape = RandomLengths((10, 10), (1, 1), num_prefixes=3, prefix_tokens=30)
    jobs = random_jobs(MODEL, 60, shape, 5)
    warm_up = random_jobs(MODEL, 60, shape, 5, warm_up=True)
    prefixes = {job.prompt[:30] for job in jobs}
    assert len(prefixes) == 3 and prefixes == {job.prompt[:30] for job in warm_up}
    suffixes = {job.prompt[30:] for job in jobs}
    assert len(suffixes) == 60 and suffixes.isdisjoint(job.prompt[30:] for job in warm_up)


def test_what_cannot_be_served_is_refused_before_it_is_sent() -> None:
    assert random_jobs(MODEL, 1, RandomLengths((1, 150), (1, 50)), 0)
    with pytest.raises(
        ValueError, match="up to 201 tokens, but tiny supports at most 200; lower --prompt"
    ):
        random_jobs(MODEL, 1, RandomLengths((1, 150), (1, 51)), 0)


@pytest.mark.parametrize("text", ["", "x", "0:4", "5:4", "1:2:3", "-3"])
def test_a_wrong_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--output-tokens="):
        parse_range("--output-tokens", text)


def test_ranges() -> None:
    assert (parse_range("x", "7"), parse_range("x", "1:9")) == ((7, 7), (1, 9))


def write_trace(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_a_trace_is_replayed_by_arrival(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path,
        {"arrival_s": 7.5, "text": "Käse", "max_tokens": 3},
        {"arrival_s": 5, "prompt_ids": [1, 2], "max_tokens": 4},
        {"arrival_s": 6, "prompt_tokens": 9, "max_tokens": 5},
        {"arrival_s": 0, "text": "beyond the bound", "max_tokens": 1},
    )
    jobs = trace_jobs(path, MODEL, 3, seed=0)
    assert jobs[0] == Job((1, 2), 4, 5.0) and jobs[2] == Job("Käse", 3, 7.5)
    assert len(jobs[1].prompt) == 9
    options = BenchOptions(workload="trace", trace=path)
    assert due_times_s(options, jobs) == [0.0, 1.0, 2.5]
    assert due_times_s(replace(options, concurrency=2), jobs) is None
    assert due_times_s(replace(options, rate=3.0), jobs) == arrival_times_s(3, 3.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "line 2: must be one JSON object"),
        ({"text": "a", "max_tokens": 1, "prompt": "x"}, "line 2: must be one JSON object"),
        ({"max_tokens": 1}, "line 2: give exactly one"),
        ({"text": "a", "prompt_tokens": 3, "max_tokens": 1}, "line 2: give exactly one"),
        ({"prompt_tokens": 0, "max_tokens": 1}, "line 2: give exactly one"),
        ({"prompt_tokens": 10**12, "max_tokens": 1}, "line 2: a prompt of 1000000000000 tokens"),
        ({"prompt_ids": ["a"], "max_tokens": 1}, "line 2: give exactly one"),
        ({"text": "a"}, "line 2: max_tokens=None"),
        ({"text": "a", "max_tokens": 1, "arrival_s": -1}, "line 2: arrival_s=-1"),
        ({"text": "a", "max_tokens": 1, "arrival_s": "soon"}, "line 2: could not convert"),
        ({"text": "a", "max_tokens": 1}, "arrival_s in all lines or in none"),
    ],
)
def test_a_wrong_trace_is_refused_by_line(tmp_path: Path, line: object, message: str) -> None:
    path = write_trace(tmp_path, {"arrival_s": 1, "text": "a", "max_tokens": 1}, line)
    with pytest.raises(ValueError, match=message):
        trace_jobs(path, MODEL, 10, seed=0)


# Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeout_s": math.nan}, "--timeout-s=nan"),
        ({"rate": 1.0, "concurrency": 1}, "--rate=1.0: cannot be combined with --concurrency"),
        ({"workload": "trace"}, "--trace=None: use it together with --workload trace"),
        ({"trace": Path("x")}, "--trace=x: use it together with --workload trace"),
        ({"address": "10.0.0.7:50051"}, "--address=10.0.0.7:50051: is another machine"),
        ({"address": "127.0.0.1:1", "launch": True}, "cannot be combined with --launch"),
        ({"sets": ["a=b"]}, "add --launch"),
        ({"compare_drafts": "0"}, "--compare-drafts=0: list 0 and"),
        ({"compare_drafts": "1,3"}, "--compare-drafts=1,3"),
        ({"compare_drafts": "0,3,3"}, "--compare-drafts=0,3,3"),
        ({"compare_drafts": "0,-1"}, "--compare-drafts=0,-1"),
        ({"compare_drafts": "0,3", "max_drafts": 1}, "--max-drafts=1"),
        ({"compare": ["drafter=mtp", "drafter=none"]}, "add --launch"),
        ({"compare": ["drafter=mtp"], "launch": True}, "repeat it for at least two settings"),
        (
            {"compare": ["drafter=mtp", "drafter=none"], "launch": True, "max_drafts": 2},
            "--max-drafts=2: cannot be combined with --compare",
        ),
        (
            {"output": Path("/no/such/folder/x.json")},
            "--output=.*: the folder of this file does not exist",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BenchOptions(), **changes).check()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rate", "0"),
        ("--burstiness", "0"),
        ("--concurrency", "4097"),
        ("--num-requests", "100001"),
        ("--duration-s", "inf"),
        ("--seed", "-1"),
        ("--trace", "/no/such/file"),
    ],
)
def test_a_value_out_of_range_is_a_wrong_command_line(option: str, value: str) -> None:
    ran = CliRunner().invoke(app, ["bench", option, value], env={"COLUMNS": "200"})
    assert ran.exit_code == 2 and f"Invalid value for '{option}'" in ran.output


def test_good_options_pass() -> None:
    BenchOptions().check()
    BenchOptions(address="10.0.0.7:50051", allow_remote=True).check()
    options = BenchOptions(compare_drafts="0,1,3", launch=True, sets=["kv.num_pages=9"])
    options.check()
    assert options.arms == [0, 1, 3] and BenchOptions(max_drafts=2).arms == [2]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:5", "localhost:5"])
def test_this_machine(address: str) -> None:
    assert is_loopback(address) and is_loopback("unix:socket")


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1:1", "0.0.0.0:1", "[::]:1", "example.org:1", "localhost.example.org:1", "", "dns:x"],
)
def test_another_machine(address: str) -> None:
    assert not is_loopback(address)


# The picture


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    drafted = replace(record(5, *[13] * 4, tokens=2), finished=answer(9, 4, 3, (3, 1, 0)))
    failed = Record(0.0, 0.0, 1.0, (), None, "INTERNAL: x")
    arms = [arm_of(n, [Run((one,), 0)], Slo()) for n, one in ((0, failed), (3, drafted))]
    save_plot(tmp_path / "x.png", "title", arms)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BenchOptions(plot=tmp_path / "x.png")
    options.check()
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="matplotlib is missing: pip install matplotlib"):
        options.check()


async def test_what_is_compared_is_checked_before_any_cluster_begins() -> None:
    options = BenchOptions(
        launch=True, compare=["drafter=none", "max_tree_nodes=99"], sets=["kv.page_size=8"]
    )
    with pytest.raises(ValueError, match=r"speculation\.max_tree_nodes"):
        await compare.compare(options, Progress(console=Console(quiet=True)))
    assert compare.set_options(options, "drafter=mtp, max_tree_nodes=9") == [
        *("kv.page_size=8", "speculation.drafter=mtp", "speculation.max_tree_nodes=9")
    ]


def test_the_fastest_is_named_with_what_asks_for_it() -> None:
    """The fastest arm is chosen by time per token, not by step time. An arm without answers comes
    last."""
    plain, drafting = record(0, 1000, 1000), record(0, 1500, tokens=3)
    found = []
    for keys, records in (("drafter=none", [plain]), ("drafter=mtp", [drafting]), ("a=b", [])):
        arm = arm_of(None, [Run(tuple(records), 0)], Slo())
        found.append(compare.ComparisonResult(keys, arm))
    console = Console(record=True, width=80, file=io.StringIO())
    compare.show(console, found)
    text = console.export_text()
    assert "with this load: --set speculation.drafter=mtp" in text and " 2.00" in text
    assert all(keys in text for keys in ("drafter=none ", "drafter=mtp ", "a=b "))
    compare.show(console, [found[2]])
    assert "fastest" not in console.export_text()
    parsed = json.loads(compare.as_json(BenchOptions(), found))
    assert [run["keys"] for run in parsed["runs"]] == ["drafter=none", "drafter=mtp", "a=b"]
