"""Answers that other servers got wrong, as reported by their users; one test for each case.

| report | what went wrong there | case |
| --- | --- | --- |
| vllm#46074, vllm-ascend#9098 | drafts need a page more than the context has | end of the context |
| TensorRT-LLM#16826 | no ``max_tokens``, a prompt that leaves one token | end of the context |
| sglang#12557, #12151 | the first token, which prefill chooses, is EOS | first token |
| sglang#6017 | ``max_tokens=1`` gives two tokens | one token |
| sglang#33643, vllm#18902, TensorRT-LLM#17701 | penalties count steps, not tokens | penalties |
| llama.cpp#27972, sglang#10660, vllm#17876 | log probabilities wrong with drafts | logprobs |
| vllm#51226, #9441, #11123, TensorRT-LLM#19487 | a seed depends on its neighbours | seeds |
| vllm#54360, #53670 | drafts cost a page of each prefix hit | prefix hits |
| dynamo#14378 | text held for a stop string is lost when the answer moves | held text |
| vllm#21570, #49250 | decode reads pages that prefill gave up | given up pages |
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engines import greedy
from tandem.core.answer import Piece
from tandem.core.errors import RankLost
from tandem.core.request import LENGTH, STOP, Request, TokenBias
from tandem.kv_transfer.peer_link import PeerLink
from tests.answers import Answered, Reference, answer_of, ask, ask_all
from tests.gates import Gate, are_active
from tests.integration.test_preemption import watch
from tests.integration.test_split import prompts, sampled
from tests.rig import Rig, rig
from tests.waiting import until

EOS = 1
PAGES = "kv.num_pages=200", "kv.page_size=16"
MAX_LEN = 1024
"""Longest context of the small checkpoint."""
MODES = "disaggregated", "colocated"
DRAFTERS: dict[str, tuple[str, ...]] = {
    "chain": ("speculation.max_depth=8",),
    "tree": ("speculation.max_depth=4", "speculation.max_tree_nodes=16"),
    "ngram": ("speculation.max_depth=8", "speculation.drafter=ngram"),
    "ngram+mtp": ("speculation.max_depth=4", "speculation.drafter=ngram+mtp"),
}
ALWAYS = "speculation.draft_length=fixed"


def drafting(request: Request, max_drafts: int) -> Request:
    """Return the request with another id and bound on drafts."""
    name = f"{request.request_id}-{max_drafts}"
    speculation = replace(request.speculation, max_drafts=max_drafts)
    return replace(request, request_id=name, speculation=speculation)


def repeating(length: int, period: int = 5) -> list[int]:
    """Return a prompt in which n-grams find tokens to draft."""
    return [40 + i % period for i in range(length)]


@pytest.mark.parametrize("max_len", [63, 64])
@pytest.mark.parametrize("name", DRAFTERS)
async def test_drafts_at_the_end_of_the_context(small_model: Path, name: str, max_len: int) -> None:
    """Four rows have exactly the pages of whole contexts. Their prompts leave 1, 2, 3 and 14
    tokens of the context, and ``max_tokens`` is the default."""
    sets = f"model.max_model_len={max_len}", "kv.page_size=8", "decode.max_num_seqs=4", ALWAYS
    reference = Reference(small_model, max_len)
    async with rig(small_model, *sets, *DRAFTERS[name], "kv.num_pages=200") as cluster:
        [decode] = cluster.decodes
        most = decode.engine.scheduler._num_pages(max_len)
    async with rig(small_model, *sets, *DRAFTERS[name], f"kv.num_pages={1 + 4 * most}") as cluster:
        requests = [
            greedy(f"r{left}", repeating(max_len - left), 128, ignore_eos=True)
            for left in (1, 2, 3, 14)
        ]
        for _ in range(2):  # the second time with prefix hits
            answers = await asyncio.gather(*(ask(cluster, one) for one in requests))
            for request, answer in zip(requests, answers, strict=True):
                reference.check(request, answer)
                assert answer.end == (max_len - len(request.prompt_ids), LENGTH)
            await cluster.check_empty()


@pytest.mark.parametrize("mode", MODES)
async def test_the_first_token_may_be_eos(small_model: Path, mode: str) -> None:
    """Prefill chooses that token; EOS ends the answer as it does after any other token."""
    [ids] = prompts(1)
    reference, eos = Reference(small_model, MAX_LEN), (TokenBias(EOS, 100.0),)
    cases: list[tuple[dict[str, Any], tuple[int, str]]] = [
        ({}, (1, STOP)),
        ({"ignore_eos": True}, (9, LENGTH)),
        ({"min_tokens": 3}, (4, STOP)),
        ({"min_tokens": 3, "ignore_eos": True, "stop_token_ids": (EOS,)}, (4, STOP)),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, (1, STOP)),
        ({"max_tokens": 1}, (1, STOP)),
        ({"temperature": 1.0}, (1, STOP)),
        ({"logprobs": 2, "stop": ("e",)}, (1, STOP)),
    ]
    async with rig(small_model, *PAGES, f"mode={mode}") as cluster:
        for rules, end in cases:
            request = greedy("r", ids, 9)
            sampling = replace(request.sampling, logit_bias=eos, **rules)
            for num_drafts in (0, 3):
                drafted = drafting(replace(request, sampling=sampling), num_drafts)
                answer = await ask(cluster, drafted)
                reference.check(drafted, answer)
                assert answer.end == end, rules
        await cluster.check_empty()


async def test_a_resumed_answer_may_end_with_its_first_token(small_model: Path) -> None:
    """Prefill chooses that token too. A stop token, a stop string or ``max_tokens`` ends it."""
    [ids] = prompts(1)
    request = greedy("rest", ids, 12, ignore_eos=True)
    async with rig(small_model, *PAGES) as cluster:
        whole = await ask(cluster, drafting(request, 0))
        tokens = whole.token_ids
        first = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
        before, after = whole.cuts[6], whole.cuts[7]
        assert [before[0], after[0]] == [7, 8]
        stop = whole.text[len(before[1]) - 5 : len(after[1])]
        cases: list[tuple[int, dict[str, Any], str]] = [
            (first, {"stop_token_ids": (tokens[first],)}, STOP),
            (7, {"stop": (stop,)}, STOP),
            (11, {}, LENGTH),
        ]
        for num, rules, reason in cases:
            sampling = replace(request.sampling, **rules)
            rest = await ask(cluster, replace(request, output_ids=tokens[:num], sampling=sampling))
            assert rest.token_ids == (tokens[num],), rules
            assert rest.end == (1, reason)
        await cluster.check_empty()


@pytest.mark.parametrize("mode", MODES)
async def test_one_token_is_one_token(small_model: Path, mode: str) -> None:
    """One answer and four answers of one token each run no decode step and keep no row."""
    [ids] = prompts(1)
    reference = Reference(small_model, MAX_LEN)
    async with rig(small_model, *PAGES, f"mode={mode}") as cluster:
        [decode] = cluster.decodes
        num_steps = decode.engine.num_steps
        for num_drafts in (0, 3):
            for num, temperature in ((1, 0.0), (4, 0.9)):
                request = sampled("r", ids, 1, logprobs=0, temperature=temperature, n=num)
                request = drafting(request, num_drafts)
                for answer in await ask_all(cluster, request):
                    reference.check(request, answer)
                    assert answer.end == (1, LENGTH)
                    assert [one.top_ids for one in answer.logprobs] == [()]
        assert decode.engine.num_steps == num_steps
        await cluster.check_empty()


@pytest.mark.parametrize("name", DRAFTERS)
async def test_penalties_and_min_tokens_count_tokens(small_model: Path, name: str) -> None:
    """Each accepted draft counts as a token. EOS and a stop token are by far the most likely
    tokens, so the answer ends right after its 17th token. Covers all drafters, plain and native
    kernels."""
    rules = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.3}
    ends = TokenBias(EOS, 100.0), TokenBias(50, 99.0)
    late = {"min_tokens": 17, "stop_token_ids": (50,), "ignore_eos": False, "logit_bias": ends}
    again = {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 0.6}
    reference = Reference(small_model, MAX_LEN)
    kernels = "model.kernels=torch" if "mtp" in name or name == "chain" else "model.kernels=native"
    async with rig(small_model, *PAGES, ALWAYS, kernels, *DRAFTERS[name]) as cluster:
        most = cluster.decodes[0].info.model.num_draft_tokens
        for i, changes in enumerate((rules, again, rules | late)):
            request = greedy(f"r{i}", repeating(40), 40, ignore_eos=True)
            request = replace(request, sampling=replace(request.sampling, **changes))
            requests = [drafting(request, num) for num in (0, 2, most)]
            answers = await asyncio.gather(*(ask(cluster, one) for one in requests))
            reference.check(requests[0], answers[0])
            assert {one.token_ids for one in answers} == {answers[0].token_ids}
            assert answers[0].end == ((18, STOP) if "min_tokens" in changes else (40, LENGTH))
        await cluster.check_empty()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_logprobs_of_accepted_drafts(small_model: Path, temperature: float) -> None:
    """Log probabilities equal those without drafts, one for each token. This holds where a stop
    string cuts a run of accepted drafts."""
    reference = Reference(small_model, MAX_LEN)
    async with rig(small_model, *PAGES, ALWAYS, *DRAFTERS["chain"]) as cluster:
        [ids] = prompts(1)
        request = sampled("r", ids, 24, logprobs=5, temperature=temperature)
        plain, drafted = [await ask(cluster, drafting(request, num)) for num in (0, 8)]
        reference.check(request, plain)
        reference.check(request, drafted)
        same_logprobs(plain, drafted, 24)
        assert len(drafted.cuts) < len(plain.cuts), "no draft was accepted"
        # Stop strings without broken characters: the decoder decides when those are final.
        parts = [plain.text[at : at + 3] for at in range(9, len(plain.text) - 3)]
        stops = [part for part in parts if "\ufffd" not in part]
        for stop in (stops[0][:2], stops[len(stops) // 2]):
            stopped = replace(request, sampling=replace(request.sampling, stop=(stop,)))
            for num in (0, 8):
                cut = await ask(cluster, drafting(stopped, num))
                reference.check(stopped, cut)
                same_logprobs(plain, cut, len(cut.token_ids))
                assert cut.end[1] == STOP
        await cluster.check_empty()


def same_logprobs(expected: Answered, found: Answered, num: int) -> None:
    """Assert that the first ``num`` tokens have the same log probabilities."""
    assert len(found.logprobs) == num
    for one, other in zip(expected.logprobs, found.logprobs, strict=False):
        assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
        assert other.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-5)
        assert len(other.top_ids) == 5


async def test_a_seed_depends_on_nothing_else(small_model: Path) -> None:
    """The answer is the same alone, next to other requests with and without seeds, and in a pool so
    small that requests are preempted."""
    ids, *others = prompts(8, 20, 60)
    request = sampled("seeded", ids, 40, seed=77)
    async with rig(small_model, *PAGES) as cluster:
        alone = await ask(cluster, request)
        await cluster.check_empty()
    for pages in PAGES, ("kv.num_pages=30", "kv.page_size=8"):
        async with rig(small_model, *pages) as cluster:
            preempted = watch(cluster)
            for seed in (None, 78):
                beside = [sampled(f"o{i}", one, 40, seed=seed) for i, one in enumerate(others)]
                requests = [request, *beside]
                answer, *_ = await asyncio.gather(*(ask(cluster, one) for one in requests))
                assert answer.token_ids == alone.token_ids
            assert bool(preempted) == (pages != PAGES)
            await cluster.check_empty()


async def test_answers_without_a_common_seed_are_no_twins(small_model: Path) -> None:
    """Sixteen requests without a seed differ, and so do sixteen answers to one with a seed."""
    [ids] = prompts(1)
    async with rig(small_model, *PAGES) as cluster:
        unseeded = [await ask(cluster, sampled(f"r{i}", ids, 12, seed=None)) for i in range(16)]
        several = await ask_all(cluster, sampled("many", ids, 12, n=16))
        for answers in unseeded, several:
            assert len({one.finished.seed for one in answers}) == 16
            assert len({one.token_ids for one in answers}) == 16
        assert several[0].finished.seed == 5
        await cluster.check_empty()


@pytest.mark.parametrize("mode", MODES)
async def test_drafts_cost_no_prefix_hit(small_model: Path, mode: str) -> None:
    """Repeated prompts of whole pages, or of one or two tokens more, hit all possible pages.

    These are the whole pages before the last token, with drafts and without.
    """
    reference = Reference(small_model, MAX_LEN)
    for num_drafts in (0, 3):
        async with rig(small_model, *PAGES, f"mode={mode}", ALWAYS) as cluster:
            for length in (48, 49, 50):
                [ids] = prompts(1, length, length, seed=length)
                request = drafting(greedy(f"r{length}", ids, 10, ignore_eos=True), num_drafts)
                first, again = [await ask(cluster, request) for _ in range(2)]
                for answer, cached in ((first, 0), (again, (length - 1) // 16 * 16)):
                    reference.check(request, answer)
                    assert answer.finished.usage.cached == cached
            await cluster.check_empty()


@pytest.mark.parametrize("mode", MODES)
async def test_cached_tokens_are_tokens_of_the_prompt(small_model: Path, mode: str) -> None:
    """The count excludes tokens of the answer, which the prefix cache also has once an answer has
    been resumed."""
    [ids] = prompts(1, 20, 20)
    async with rig(small_model, *PAGES, f"mode={mode}") as cluster:
        whole = await ask(cluster, greedy("whole", ids, 60, ignore_eos=True))
        request = greedy("rest", ids, 60, ignore_eos=True)
        found = []
        for num in (10, 50, 50, 59):
            rest = await ask(cluster, replace(request, output_ids=whole.token_ids[:num]))
            assert whole.token_ids == whole.token_ids[:num] + rest.token_ids
            usage = rest.finished.usage
            assert (usage.prompt, usage.completion) == (20, 60 - num)
            found.append(usage.cached)
        assert found == [16, 16, 20, 20]
        await cluster.check_empty()


async def test_text_that_is_held_survives_a_move(small_model: Path) -> None:
    """The decode rank is lost after each step in turn while the gateway holds back text.

    The text is an unfinished character or a prefix of a stop string that may end only after the
    move.
    """
    [ids] = prompts(1)
    request = sampled("r", ids, 14, temperature=2.0, seed=3)
    async with rig(small_model, *PAGES, "decode.replicas=2", ALWAYS) as cluster:
        whole = await ask(cluster, request)
        text = whole.text
        starts = tuple(text[i : i + 6] + "~" for i in range(0, len(text) - 6, 3))[:20]
        for stop in (), (text[-8:-3],):
            held = replace(request, sampling=replace(request.sampling, stop=(*starts, *stop)))
            expected = await ask(cluster, held)
            assert expected.text == (text[: text.index(stop[0])] if stop else text)
            num_held = 0
            for num_steps in range(1, 5):
                moved = await ask_and_move(cluster, held, num_steps)
                num, told = moved.cuts[num_steps]
                num_held += told != cluster.gateway.tokenizer.decode([*moved.token_ids[:num]])
                assert moved.text == expected.text
                assert moved.token_ids == expected.token_ids
                assert moved.end == expected.end
            assert num_held > 1, "nothing was held when the answer moved"
        await cluster.check_empty()


async def ask_and_move(cluster: Rig, request: Request, num_steps: int) -> Answered:
    """Return the answer to a request whose decode rank is lost after ``num_steps`` steps."""
    gates = {decode.spec.epoch_name: Gate(decode) for decode in cluster.decodes}
    pieces: list[Piece] = []

    async def read() -> None:
        async for piece in cluster.generate(request):
            pieces.append(piece)

    running = asyncio.create_task(read())
    await until(lambda: any(are_active(decode, 1) for decode in cluster.decodes))
    [first] = [decode for decode in cluster.decodes if are_active(decode, 1)]
    for num in range(num_steps):
        await until(lambda: gates[first.spec.epoch_name].is_held)
        gates[first.spec.epoch_name].give()
        await until(lambda num=num: len(pieces) == num + 2)
    cluster.members.remove(first.spec.epoch_name)
    await until(lambda: not are_active(first, 1) or len(cluster.gateway.fleet.usable_pairs()) == 1)
    for gate in gates.values():
        gate.open()
    await running
    cluster.members.add(first)
    await until(lambda: len(cluster.gateway.fleet.usable_pairs()) == 2)
    return answer_of(pieces)


async def test_pages_that_prefill_gave_up_are_never_read(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull stops after its first chunk until its lease has expired and other prompts have taken
    the prefill rank's pages. Checksums are off, so only page generations protect it."""
    call, goes_on, num_sent = PeerLink.call, asyncio.Event(), 0

    async def held(self: PeerLink, method: str, message: Any, *rest: Any, **named: Any) -> Any:
        nonlocal num_sent
        if not goes_on.is_set() and method == "renew":
            raise RankLost("the call is lost")
        if method == "send" and message.identity.request_id == "held":
            num_sent += 1
            if num_sent > 1:
                await goes_on.wait()
        return await call(self, method, message, *rest, **named)

    sets = "kv.num_pages=40", "kv.page_size=8", "kv_transfer.lease_s=0.5"
    staging = "kv_transfer.staging_bytes=65536", "kv_transfer.checksums=false"
    ids, *others = prompts(9, 90, 100, seed=4)
    async with rig(small_model, *sets, *staging) as cluster:
        [prefill] = cluster.prefills
        monkeypatch.setattr(PeerLink, "call", held)
        request = greedy("held", ids, 20, ignore_eos=True)
        running = asyncio.create_task(ask(cluster, request))
        await until(lambda: num_sent > 1)
        await until(lambda: not prefill.source.counts()["leases"])
        for i, other in enumerate(others):
            await ask(cluster, greedy(f"o{i}", other, 1, ignore_eos=True))
        goes_on.set()
        answer = await running
        Reference(small_model, MAX_LEN).check(request, answer)
        assert sum(cluster.gateway.migrations.values()) > 0
        await cluster.check_empty()
