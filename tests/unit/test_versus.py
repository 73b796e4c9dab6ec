"""benchmarks/versus: figures computed from recorded events; no engine runs here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.versus import arms as arms_module
from benchmarks.versus.__main__ import options_of
from benchmarks.versus.arms import LLAMA, OFFLINE, PEERS, SPLIT, TANDEM, Arm, choose
from benchmarks.versus.checkpoints import Checkpoint
from benchmarks.versus.environments import requirements_of
from benchmarks.versus.goodput import Limits, by_arm
from benchmarks.versus.job import Event, Job, Trial, heard, read_job, write_job
from benchmarks.versus.loads import Load, arriving, loads_of
from benchmarks.versus.machine import moment
from benchmarks.versus.measures import measure, repeated_ngrams
from benchmarks.versus.ratios import TPOT, agree, all_ratios, fastest, ratio
from benchmarks.versus.report import curves, write_page
from benchmarks.versus.results import Result, Results
from benchmarks.versus.runner import Settings, owed_turns
from benchmarks.versus.tables import all_grids

LOAD = Load(128, 8, 0.0, 32)
LIMITS = Limits(2000.0, 20.0)
RANDOM = Checkpoint("random-0.5b", Path("nowhere"), is_trained=False)


def batch(**values: Any) -> dict[str, Any]:
    names = ("ttft_ms", "prefill_ms", "tpot_ms", "tokens_per_s", "accepted_length")
    return dict.fromkeys(names) | {"repeated_ngrams": 0.0, "num_tokens": 1} | values


def result(arm: str, tpot: float | None, n: int = 0, length: float | None = None) -> Result:
    family = next((one for one in PEERS if arm.startswith(one)), TANDEM)
    setting = SPLIT if "split" in arm else OFFLINE
    about = {"cpu": "one", "cpu_flags": [], "cores": [0]}
    made = Result(arm, family, setting, n, "c", LOAD.name, 128, 8, 0.0, "bfloat16", about=about)
    made.rounds = [[batch(tpot_ms=tpot, accepted_length=length)]]
    return made


def test_steady_decode_begins_when_all_have_begun_and_ends_when_a_quarter_has_ended() -> None:
    events = [Event(float(i), i, [7]) for i in range(4)]  # the last first token comes at 3 s
    events += [Event(2.5, 0, [8] * 50)]  # not in the steady part
    events += [Event(3.0 + 0.5 * k, i, [9, 9]) for k in range(1, 5) for i in range(3)]
    events += [Event(3.0 + 0.5 * k, 3, [9, 9]) for k in range(1, 41)]  # continues alone
    found = measure(events, [0.0] * 4)
    assert found.tpot_ms == pytest.approx(250)
    assert found.ttft_ms == pytest.approx(1500) and found.prefill_ms == pytest.approx(3000)


def test_tpot_of_one_sequence_and_its_accepted_length() -> None:
    found = measure([Event(1.0, 0, [1]), Event(1.3, 0, [1, 2, 3]), Event(1.4, 0, [4])], [0.0])
    assert found.tpot_ms == pytest.approx(100) and found.accepted_length == 2
    assert found.tokens_per_s == pytest.approx(5 / 1.4)


def test_an_answer_of_one_token_has_no_tpot_and_none_at_all_is_an_error() -> None:
    assert measure([Event(1.0, 0, [1])], [0.0]).tpot_ms is None
    with pytest.raises(ValueError, match=r"\[1\] of 2"):
        measure([Event(1.0, 0, [1])], [0.0, 0.0])


def test_times_count_from_each_arrival_and_all_gaps_do_where_sequences_arrive() -> None:
    arrivals_s = [0.5, 2.0]
    events = [Event(1.0 + k, 0, [k]) for k in range(3)] + [Event(2.25, 1, [1]), Event(2.5, 1, [2])]
    found = measure(events, arrivals_s)
    assert found.ttft_ms == pytest.approx(375) and found.span_s == pytest.approx(2.5)
    assert (found.itl_p50_ms, found.itl_p99_ms) == (1000.0, 1000.0)
    assert found.requests == [(500.0, 1000.0), (250.0, 250.0)]
    assert found.tpot_ms is None and found.prefill_ms is None


def test_goodput_is_of_requests_that_keep_both_limits() -> None:
    found = result("tandem-n0", 1.0)
    requests = [(100.0, 5.0), (2500.0, 5.0), (100.0, 50.0), (1999.0, 20.0)]
    found.rounds, found.rate_per_s = [[batch(requests=requests, span_s=4.0)] * 2], 3.0
    assert by_arm([found, result("vllm-n0", 1.0)], LIMITS) == {"tandem-n0": {3.0: 0.5}}
    peers = [result("vllm-n0", 1.0), result("vllm-n3", 1.0)]
    for peer, median_ms in zip(peers, (8.0, 6.0), strict=True):
        peer.num_sequences, peer.rounds = 1, [[batch(itl_p50_ms=median_ms)]]
    assert Limits().of([found]) is None and Limits().of([found, *peers]) == Limits(2000.0, 12.0)


def test_arrivals_are_the_same_for_all_and_as_many_a_second_as_asked() -> None:
    [load] = arriving([128], [4.0], 400, 32)
    assert load.name == "p128-s400-o32-r4"
    trials = [load.trial(RANDOM, range(1)) for _ in range(2)]
    assert trials[0] == trials[1] and len(trials[0].warm_up) == 4
    arrivals_s = trials[0].arrivals_s
    assert arrivals_s == sorted(arrivals_s) and arrivals_s[0] == 0
    assert arrivals_s[-1] == pytest.approx(100, rel=0.15) and not trials[0].warming().arrivals_s


def test_repeated_ngrams_count_within_an_answer_only() -> None:
    once = list(range(10))
    assert repeated_ngrams([once, once]) == 0
    assert repeated_ngrams([[1] * 10], size=8) == pytest.approx(2 / 3)
    assert repeated_ngrams([[1, 2]]) == 0


def test_the_fastest_peer_at_a_load_is_the_divisor() -> None:
    failed = result("vllm-zen-n0", 1.0)
    failed.error = "no AVX-512"
    elsewhere = result("vllm-split-n0", 2.0)
    found = [result("tandem-n0", 10.0), result("vllm-n0", 20.0), result("vllm-mha-n0", 16.0)]
    found += [result("vllm-mha-n3", 8.0, 3, 2.0), failed, elsewhere]
    one = ratio(found[0], found, TPOT)
    assert (one.same_n, one.same_n_peer) == (10 / 16, "vllm-mha-n0")
    assert (one.best, one.best_peer) == (10 / 8, "vllm-mha-n3")
    assert one.agrees is None
    assert fastest([failed, result("x", None)], TPOT) is None


def test_speculative_ratios_count_only_if_accepted_lengths_agree() -> None:
    peer = result("vllm-n3", 8.0, 3, 3.0)
    for length, agrees in ((3.09, True), (2.9, False), (None, False)):
        one = ratio(result("tandem-n3", 4.0, 3, length), [peer], TPOT)
        assert one.agrees is agrees
    assert agree(2.91, 3.0) and not agree(2.0, None)


def test_only_peers_of_the_same_load_dtype_and_checkpoint_count() -> None:
    peers = [result("vllm-n0", 1.0) for _ in range(3)]
    peers[0].load, peers[1].dtype, peers[2].checkpoint = "other", "float32", "other"
    assert all_ratios([result("tandem-n0", 2.0), *peers], TPOT)[0].best is None


def test_each_peer_divides_by_itself_and_none_by_another(tmp_path: Path) -> None:
    found = [result("tandem-n0", 10.0), result("vllm-n0", 20.0), result("llama-n0", 40.0)]
    [one], [other] = all_ratios(found, TPOT), all_ratios(found, TPOT, LLAMA)
    assert (one.best, one.best_peer) == (0.5, "vllm-n0")
    assert (other.best, other.best_peer) == (0.25, "llama-n0")
    titles = [grid.title for grid in all_grids(found, LIMITS)]
    assert {
        f"time per output token divided by {peer}'s (c, bfloat16)" for peer in PEERS.values()
    } < {*titles}


def settings(tmp_path: Path, num_rounds: int) -> Settings:
    return Settings("bfloat16", num_rounds, 1, [0], tmp_path, 1.0, [])


def test_a_result_in_the_file_is_kept_and_only_what_lacks_is_owed(tmp_path: Path) -> None:
    arms = choose(["tandem", "vllm"], [0])
    results = Results(tmp_path / "out" / "results.jsonl")
    loads = {RANDOM.name: [LOAD]}
    owed = owed_turns(arms, loads, [RANDOM], results, settings(tmp_path, 2))
    order = [(turn.round, turn.arm.name) for turn in owed]
    assert order == [(0, "tandem-n0"), (0, "vllm-n0"), (1, "vllm-n0"), (1, "tandem-n0")]
    results.of(arms[0], RANDOM.name, LOAD, "bfloat16").rounds = [[batch(tpot_ms=1.0)]]
    results.of(arms[1], RANDOM.name, LOAD, "bfloat16").error = "it failed"
    results.save()
    again = Results(results.path)
    owed = owed_turns(arms, loads, [RANDOM], again, settings(tmp_path, 2))
    assert [(turn.round, turn.arm.name) for turn in owed] == [(1, "tandem-n0")]
    again.drop(arms[1], RANDOM.name, LOAD, "bfloat16")
    assert len(owed_turns(arms, loads, [RANDOM], again, settings(tmp_path, 1))) == 1


def test_a_line_that_is_no_result_is_told(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"arm": "tandem-n0"}\n')
    with pytest.raises(ValueError, match="line 1"):
        Results(path)


def test_loads_leave_out_what_is_too_much_and_sample_only_the_trained_one() -> None:
    trained = Checkpoint("shipped", Path("nowhere"), is_trained=True)
    sizes = ([128, 1024], [1, 64], [0.0, 0.8], 128, 8192)
    assert [load.name for load in loads_of(RANDOM, *sizes)] == [
        "p128-s1-o128",
        "p128-s64-o128",
        "p1024-s1-o128",
    ]
    names = {load.name for load in loads_of(trained, *sizes)}
    assert "p128-s64-t0.8-o128" in names and "p1024-s1-t0.8-o128" not in names


def test_prompts_are_the_same_for_every_arm_and_others_in_each_batch() -> None:
    one, two = LOAD.trial(RANDOM, range(2)), LOAD.trial(RANDOM, range(2))
    assert one == two and one.ignore_eos
    seen = [tuple(prompt) for group in (one.warm_up, *one.batches) for prompt in group]
    assert len(set(seen)) == len(seen) == 24 and {len(prompt) for prompt in seen} == {128}


def test_a_job_survives_its_file_and_tells_what_it_needs(tmp_path: Path) -> None:
    trial = Trial("t", [[1] * 100], [[[2] * 100]], 28, True)
    job = Job("path", "bfloat16", 3, 2, [0, 1], [trial])
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job
    assert job.max_model_len == 192 and job.max_sequences == 1
    assert heard('@@{"kind": "end"}\n') == {"kind": "end"} and heard("INFO @@{") is None


def test_neighbours_compute_while_their_trial_is_taken_and_end_with_it() -> None:
    alone, beside = LOAD, replace(LOAD, num_busy=2)
    assert beside.name == f"{alone.name}-b2"
    trials = [load.trial(RANDOM, range(1)) for load in (beside, alone)]
    children, job = Path("/proc/thread-self/children"), Job("", "", 0, 1, [], trials)
    before = set(children.read_text().split())
    seen = [len(set(children.read_text().split()) - before) for _ in job.in_turn()]
    assert seen == [2, 0]


def test_arms_are_chosen_by_name_with_or_without_drafts() -> None:
    assert [arm.name for arm in choose(["vllm-mha-n2"], [0, 1, 2])] == ["vllm-mha-n2"]
    assert [arm.name for arm in choose(["tandem", "transformers"], [0, 3])] == [
        "tandem-n0",
        "tandem-n3",
        "transformers",
    ]
    with pytest.raises(ValueError, match="matches none of: llama, tandem, "):
        choose(["sglang"], [0])
    assert len({arm.name for arm in arms_module.all_arms()}) == len(arms_module.all_arms())


def test_quick_yields_to_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(["--quick", "--sequences", "4"])
    assert options.sequences == [4] and options.max_tokens == 32 and options.drafts == [0, 3]
    with pytest.raises(SystemExit):
        options_of(["--checkpoints", "mine"])
    assert "choose from shipped" in capsys.readouterr().err


def test_requirements_leave_out_what_is_in_the_way(tmp_path: Path) -> None:
    import zipfile

    asked = ["torch==2.13.0+cpu", "torchaudio", "numpy", 'zentorch; extra == "zen"']
    asked += ["fastapi[standard]<1", 'six; python_version < "3"']
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        lines = "".join(f"Requires-Dist: {line}\n" for line in asked)
        file.writestr("w-1.dist-info/METADATA", f"Metadata-Version: 2.1\n{lines}")
    assert requirements_of(wheel) == ["numpy", "fastapi[standard]<1"]


def test_the_page_marks_busy_figures_and_lists_failures(tmp_path: Path) -> None:
    busy, failed = result("tandem-n0", 10.0), result("vllm-zen-n0", None)
    busy.about |= moment(sample_s=0) | {"is_busy": True}
    failed.rounds, failed.error = [], "no | such processor"
    found = [busy, failed, result("vllm-n0", 20.0)]
    write_page(tmp_path / "README.md", found, "python -m benchmarks.versus", [], LIMITS)
    text = (tmp_path / "README.md").read_text()
    assert "| tandem-n0 | 10* |" in text and "| 0.5 | vllm-n0 |" in text
    assert "no / such processor" in text and "a rehearsal, no result" in text
    assert all(
        len(row) == len(grid.header) for grid in all_grids(found, LIMITS) for row in grid.rows
    )


def test_curves_take_the_fastest_number_of_drafts() -> None:
    found = [result("vllm-n0", 20.0), result("vllm-n3", 8.0, 3), result("tandem-n0", 10.0)]
    assert curves(found) == {"vllm": {8: 8.0}, "tandem": {8: 10.0}}


def test_transformers_takes_no_load_it_was_not_made_for() -> None:
    arm = Arm("t", "transformers", OFFLINE, "m", sequences=(1, 8), samples=False)
    assert arm.takes(8, 0.0) and not arm.takes(32, 0.0) and not arm.takes(8, 0.8)
