"""Values that are not finite end exactly the answers that they reach, with a named failure.

They are planted in weights, pages and drafters. The oracle is transformers on the same checkpoint.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.request import REJECTION, REJECTION_GREEDY, STRICT, Request, Speculation, TokenBias
from tandem.model.network.cache import MAIN
from tests.kernels import native_only
from tests.often import often

pytestmark = native_only
NAN, BROKEN, SEED, NUM_TOKENS, NUM_LAYERS = float("nan"), "NonFiniteLogits", 8, 10, 3
PROMPTS = [[5, 9, 31, 40, 7], list(range(20, 43)), [3, 3, 60, 61], [11, 50, 2, 77, 80, 81, 12]]
Answer = tuple[list[int], str]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    tiny.write_tiny(folder, seed=SEED)
    return folder


@lru_cache
def planted(clean: Path, name: str, row: int | None = None) -> Path:
    """Write the checkpoint with NaN in tensors whose names contain ``name``: in one row, or all
    (None)."""
    folder = clean.parent / f"{name}{row}"
    folder.mkdir()
    tensors = load_file(clean / "model.safetensors")
    chosen = [one for one in tensors if name in one]
    assert chosen, name
    for one in chosen:
        tensors[one][... if row is None else row] = NAN
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((clean / "config.json").read_bytes())
    return folder


@lru_cache
def expected(folder: Path, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> Answer:
    """Compute an answer with transformers, recomputing the whole text for each token."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = tiny.reference_logits(folder, [*prompt, *output])[-1]
        if not logits.isfinite().all():
            return output, BROKEN
        output.append(int(logits.argmax()))
    return output, "length"


def all_expected(folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Answer]:
    return [expected(folder, tuple(prompt)) for prompt in prompts]


def written_token(folder: Path) -> int:
    """Return a token that occurs in answers, but not as their first token or in a prompt."""
    answers = [tokens for tokens, _ in all_expected(folder)]
    known = {*chain(*PROMPTS), *(tokens[0] for tokens in answers)}
    return next(token for token in chain(*answers) if token not in known)


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, **more: object) -> list[Request]:
    return [
        greedy(f"r{i}", list(prompt), NUM_TOKENS, ignore_eos=True, **more)
        for i, prompt in enumerate(prompts)
    ]


def sampled(request: Request, acceptance: str, top_k: int = 1) -> Request:
    """Return the request with sampling. ``top_k`` 1 makes it greedy, whatever the draws."""
    sampling = replace(request.sampling, temperature=1.0, top_k=top_k)
    return replace(request, sampling=sampling, speculation=Speculation(acceptance=acceptance))


def bench_of(folder: Path, kernels: str, num_drafts: int, *sets: str) -> Bench:
    """Return a bench whose small page pool forces pages to be reused."""
    loaded = load(folder, f"model.kernels={kernels}", *sets)
    assert loaded.kernels.name == kernels
    return Bench(loaded, num_drafts=num_drafts, num_pages=72, page_size=4, max_rows=5)


kernels_and_drafts = pytest.mark.parametrize(
    ("kernels", "num_drafts"), [("native", 0), ("native", 3), ("torch", 0), ("torch", 3)]
)


def check(folder: Path, kernels: str, num_drafts: int, prompts: Sequence[Sequence[int]]) -> None:
    """Check the answers twice, so that pages of broken rows are reused, and each one alone."""
    bench, wanted = bench_of(folder, kernels, num_drafts), all_expected(folder, prompts)
    assert bench.generate(*requests(prompts)) == wanted
    assert bench.generate(*requests(prompts)[::-1]) == wanted[::-1]
    for request, one in zip(requests(prompts), wanted, strict=True):
        assert bench.generate(request) == [one]
    bench.check_empty()
    num_broken = sum(reason == BROKEN for _, reason in wanted)
    assert bench.decode._counters["num_non_finite"] == 3 * num_broken


@kernels_and_drafts
def test_a_row_of_the_embedding(clean: Path, kernels: str, num_drafts: int) -> None:
    """One prompt contains the token, another answer emits it, and other rows may draft it."""
    token = written_token(clean)
    folder = planted(clean, "embed_tokens", token)
    prompts = [*PROMPTS, [5, 9, 31, token, 7, 8, 9, 10]]
    reasons = {(len(tokens) > 0, reason) for tokens, reason in all_expected(folder, prompts)}
    assert reasons == {(True, "length"), (True, BROKEN), (False, BROKEN)}
    check(folder, kernels, num_drafts, prompts)


@kernels_and_drafts
def test_one_expert(clean: Path, kernels: str, num_drafts: int) -> None:
    """A broken expert ends only the answers whose tokens choose it."""
    folder = planted(clean, "layers.2.mlp.experts.5.")
    prompts = [[one] for one in range(2, 60, 6)][:5]
    reasons = [reason for _, reason in all_expected(folder, prompts)]
    assert BROKEN in reasons and "length" in reasons, reasons
    check(folder, kernels, num_drafts, prompts)


@pytest.mark.parametrize("name", ["model.norm", "layers.1.input_layernorm"])
@kernels_and_drafts
def test_a_norm(clean: Path, kernels: str, num_drafts: int, name: str) -> None:
    """A broken norm ends every answer without a token."""
    folder = planted(clean, name)
    bench = bench_of(folder, kernels, num_drafts)
    assert bench.generate(*requests()) == [([], BROKEN)] * len(PROMPTS)
    assert not len(bench.prefill.scheduler._pages.prefixes)
    bench.check_empty()


@kernels_and_drafts
def test_a_page_of_one_row(clean: Path, kernels: str, num_drafts: int) -> None:
    """A broken page ends its row with the tokens that the row had. The page is overwritten when it
    is reused."""
    bench, wanted = bench_of(clean, kernels, num_drafts), all_expected(clean)
    started = bench.start_all(*requests())
    bench.decode.step()
    page = bench.sequence("r1").pages[2]
    for cache in bench.caches[MAIN][1:]:
        cache[page, 1] = NAN
    while bench.decode.has_work():
        bench.decode.step()
    for i, (tokens, _) in enumerate(wanted):
        own = [update for update in bench.updates() if update.identity.request_id == f"r{i}"]
        got = [started[f"r{i}"][0], *(token for update in own for token in update.token_ids)]
        if i == 1:
            assert own[-1].failure is not None and own[-1].failure.text.startswith("non_finite: r1")
            assert got == tokens[: len(got)] and len(got) < len(tokens)
        else:
            assert got == tokens and own[-1].finish_reason == "length"
    for _ in range(3):
        assert bench.generate(*requests()) == wanted
    bench.check_empty()


@kernels_and_drafts
def test_a_page_that_rows_share(clean: Path, kernels: str, num_drafts: int) -> None:
    """A broken page ends all rows that share it, and the next request computes it again."""
    bench, others = bench_of(clean, kernels, num_drafts), requests()[:1]
    asked = [greedy(f"s{i}", [*PROMPTS[1][:9], 30 + i], NUM_TOKENS) for i in range(3)]
    whole = bench.generate(*asked)
    known = bench.prefill.scheduler._pages.prefixes
    page = known.acquire([*PROMPTS[1][:9], 30])[1]
    bench.pool.release(known.acquire([*PROMPTS[1][:9], 30]) * 2)
    bench.caches[MAIN][0][page, 1, 7] = NAN
    assert bench.generate(*asked, *others) == [([], BROKEN)] * 3 + all_expected(clean)[:1]
    assert bench.generate(*asked) == whole
    bench.check_empty()


@pytest.mark.parametrize("value", [NAN, float("inf")])
@kernels_and_drafts
def test_the_dummy_page(clean: Path, kernels: str, num_drafts: int, value: float) -> None:
    """The dummy page and all unwritten pages may hold values that are not finite."""
    bench = bench_of(clean, kernels, num_drafts)
    for cache in bench.all_caches():
        cache.fill_(value)
    bench.start_all(*requests())
    while bench.decode.has_work():
        for cache in bench.all_caches():
            cache[0] = value
        bench.decode.step()
    bench.frames.clear()
    assert bench.generate(*requests()) == all_expected(clean)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@kernels_and_drafts
def test_a_request_that_forbids_every_token(
    clean: Path, kernels: str, num_drafts: int, temperature: float
) -> None:
    """A rank fails a request that forbids every token, also after accepted drafts. A gateway would
    reject it."""
    bench, wanted = bench_of(clean, kernels, num_drafts), all_expected(clean)
    most = [TokenBias(token, 100.0) for token in wanted[0][0]]
    hot = replace(requests()[0].sampling, temperature=temperature, min_tokens=5)
    barred = replace(hot, stop_token_ids=(*range(96),), logit_bias=(*most,))
    asked = [replace(requests()[0], request_id="barred", sampling=barred), *requests()[1:]]
    assert bench.generate(*asked) == [([], BROKEN), *wanted[1:]]
    resumed = replace(asked[0], request_id="resumed", output_ids=(*wanted[0][0][:5],))
    [(tokens, reason)] = bench.generate(resumed)
    assert len(tokens) == 1 and reason == "stop"
    bench.check_empty()


TREE = "speculation.max_tree_nodes=9", "speculation.max_depth=3", "speculation.top_k=3"


@pytest.mark.parametrize("name", ["layers.3.eh_proj", "layers.3.mlp.experts.2."])
@pytest.mark.parametrize("sets", [(), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(
    "acceptance",
    often(["greedy", STRICT, REJECTION, REJECTION_GREEDY], ["greedy", REJECTION]),
)
def test_a_draft_layer(
    clean: Path, acceptance: str, kernels: str, sets: tuple[str, ...], name: str
) -> None:
    """A broken draft layer costs drafts but no answer, for every kind of acceptance."""
    bench = bench_of(planted(clean, name), kernels, 3, *sets)
    asked = requests()
    if acceptance != "greedy":
        asked = [sampled(one, acceptance) for one in asked]
    for _ in range(2):
        assert bench.generate(*asked) == all_expected(clean)
    bench.check_empty()


@pytest.mark.parametrize("sets", [(), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_token_that_no_answer_has(clean: Path, kernels: str, sets: tuple[str, ...]) -> None:
    """Only drafts contain such tokens, so all values after them in the step are NaN. No answer is
    affected."""
    answers = chain(*(tokens for tokens, _ in all_expected(clean)))
    bench = bench_of(clean, kernels, 3, *sets)
    weight = bench.loaded.network.model.embed_tokens.weight
    weight[sorted({*range(96)} - {*answers, *chain(*PROMPTS)})] = NAN
    for acceptance in (STRICT, REJECTION):
        asked = [sampled(one, acceptance) for one in requests()]
        assert bench.generate(*asked) == all_expected(clean)
        assert bench.generate(*requests()) == all_expected(clean)
    bench.check_empty()
