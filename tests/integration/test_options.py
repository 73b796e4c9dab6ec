"""Stop strings, log probabilities and several answers, over the whole path of a request."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.engines import greedy
from tandem import AsyncClient, GenerateOptions
from tandem.cluster.client.options import build_request
from tandem.cluster.entrypoints.request_mapping import to_raw_request
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.gateway.checks import check_request
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.core.answer import Delta, Finished
from tandem.core.config import load
from tandem.core.errors import Overloaded
from tandem.core.request import Request
from tests.gates import Gate, are_active
from tests.integration.test_preemption import watch
from tests.integration.test_split import SMALL, prompts, sampled
from tests.rig import Rig, rig
from tests.waiting import until


async def test_stop_strings_end_answers_and_free_their_rows(small_model: Path) -> None:
    """For every n, the text ends before the stop string and the completing token is counted.
    Nothing is left behind."""
    async with rig(small_model, *SMALL) as cluster:
        for ids in prompts(3):
            whole, text, _ = await cluster.complete(greedy("whole", ids, 40, ignore_eos=True))
            decode = cluster.gateway.tokenizer.decode
            for start, length in ((0, 1), (5, 3), (20, 7)):
                stop = text[start : start + length]
                end = text.index(stop) + len(stop)
                num_tokens = next(i for i in range(1, 41) if len(decode(whole[:i])) >= end)
                asked = [
                    greedy(f"{start} {n}", ids, 40, max_drafts=n, ignore_eos=True, stop=(stop,))
                    for n in range(4)
                ]
                for request in asked:
                    tokens, told, finished = await cluster.complete(request)
                    assert (told, tokens) == (text[: text.index(stop)], whole[:num_tokens])
                    assert finished.finish_reason == "stop"
                    assert finished.usage.completion == num_tokens
                    counts = finished.speculation
                    assert counts.num_accepted == sum(counts.accepted_per_position)
                    assert num_tokens - 1 - counts.num_steps <= counts.num_accepted < num_tokens
                again, told, finished = await cluster.complete(
                    replace(asked[0], output_ids=tuple(whole[:num_tokens]))
                )
                assert (again, told, finished.finish_reason) == ([], "", "stop")
        await cluster.check_empty()


async def test_logprobs_travel_with_their_tokens(small_model: Path) -> None:
    [ids] = prompts(1)
    async with rig(small_model, *SMALL) as cluster:
        asked = [greedy(f"{n}", ids, 12, max_drafts=n, logprobs=2, ignore_eos=True) for n in (0, 3)]
        for request in asked:
            stream = cluster.generate(request)
            deltas = [piece async for piece in stream if isinstance(piece, Delta)]
            tokens = [token for delta in deltas for token in delta.token_ids]
            told = [token for delta in deltas for token in delta.logprobs]
            assert [token.top_ids[0] for token in told] == tokens, "greedy takes the likeliest"
            assert [token.top_logprobs[0] for token in told] == [token.logprob for token in told]
        await cluster.check_empty()


async def answers_of(cluster: Rig, request: Request) -> dict[int, tuple[list[int], Finished]]:
    """Return token ids and the last message by index; nothing may follow a Finished."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, Finished] = {}
    async for piece in cluster.generate(request):
        assert piece.index not in ended
        if isinstance(piece, Delta):
            tokens.setdefault(piece.index, []).extend(piece.token_ids)
        else:
            ended[piece.index] = piece
    return {index: (tokens.get(index, []), ended[index]) for index in ended}


async def test_each_of_n_answers_is_that_of_its_own_seed(small_model: Path) -> None:
    """This holds with fewer rows than answers, too. The first is the answer of n = 1."""
    [ids] = prompts(1)
    async with rig(small_model, *SMALL, "decode.max_num_seqs=2") as cluster:
        answers = await answers_of(cluster, sampled("many", ids, 12, n=5))
        assert sorted(answers) == [0, 1, 2, 3, 4]
        for i, (tokens, finished) in sorted(answers.items()):
            again, _, _ = await cluster.complete(sampled(f"r{i}", ids, 12, seed=finished.seed))
            assert again == tokens
        assert answers[0][1].seed == 5
        assert len({tuple(tokens) for tokens, _ in answers.values()}) > 1
        await cluster.check_empty()


async def test_aborting_closing_or_refusing_n_answers_frees_all(small_model: Path) -> None:
    [ids] = prompts(1)
    async with rig(small_model, *SMALL, "decode.max_num_seqs=2", "server.max_queued=2") as cluster:
        many = sampled("many", ids, 100, n=4)
        aborting = asyncio.create_task(answers_of(cluster, many))
        held = Gate(cluster.decodes[0])
        await until(lambda: are_active(cluster.decodes[0], 2) and held.is_held, held.answer)
        cluster.begun["many"].abort()
        held.open()
        ends = [finished.finish_reason for _, finished in (await aborting).values()]
        assert ends == ["abort"] * 4
        stream = cluster.generate(many)
        await anext(stream)
        await stream.aclose()
        await cluster.check_empty()
        with pytest.raises(Overloaded, match="queued"):
            await answers_of(cluster, sampled("many", ids, 100, n=5))
        await cluster.check_empty()
        assert not sum(map(len, cluster.gateway.open_answers))


async def test_all_of_it_over_grpc(small_model: Path) -> None:
    """n answers, log probabilities and a stop string over a real server's socket."""
    [ids] = prompts(1)
    async with (
        rig(small_model, *SMALL) as cluster,
        Server(load(None, ["server.address=127.0.0.1:0"])) as server,
    ):
        await server.attach(cluster.gateway)
        assert cluster.gateway.model.think_token_ids == (2, 3)
        _, text, _ = await cluster.complete(greedy("whole", ids, 20, ignore_eos=True))
        message = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.Sampling(max_tokens=20, n=2, logprobs=1, stop=[text[6:9]], ignore_eos=True),
        )
        async with grpc.aio.insecure_channel(server.address) as channel:
            pieces = [piece async for piece in rpc.InferenceStub(channel).Generate(message)]
        for index in (0, 1):
            deltas = [p.delta for p in pieces if p.HasField("delta") and p.delta.index == index]
            ends = [p.finished for p in pieces if p.HasField("finished")]
            [end] = [finished for finished in ends if finished.index == index]
            assert "".join(delta.text for delta in deltas) == text[: text.index(text[6:9])]
            assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
            assert end.finish_reason == "stop"
            assert end.usage.completion == sum(len(delta.token_ids) for delta in deltas)
        async with AsyncClient(server.address) as client:
            warm = GenerateOptions(max_tokens=20, temperature=0.9, ignore_eos=True)
            several = await client.complete_all(ids, n=3, seed=7, **warm)
            for i, answer in enumerate(several):
                alone = await client.complete(ids, seed=answer.finished.seed, **warm)
                assert (answer.finished.index, alone.token_ids) == (i, answer.token_ids)
            assert len(several) == 3 and len({answer.text for answer in several}) > 1
        await cluster.check_empty()


async def test_preemption_changes_neither_penalties_nor_stops(small_model: Path) -> None:
    """Counts and held-back text depend only on (request, output ids), not on the rank that
    resumes."""
    rules = {"frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 50}
    asked = [
        sampled(f"r{i}", ids, 60, seed=i, stop=("\n", "e"), **rules)
        for i, ids in enumerate(prompts(8, 20, 60))
    ]
    answers = []
    for num_pages in (400, 24):
        async with rig(small_model, f"kv.num_pages={num_pages}", "kv.page_size=8") as cluster:
            preempted = watch(cluster)
            done = await asyncio.gather(*(cluster.complete(request) for request in asked))
            answers.append([(ids, text, end.finish_reason) for ids, text, end in done])
            assert bool(preempted) == (num_pages == 24)
            for ids, _, end in done:
                assert len(ids) >= 30
                counts = end.speculation
                assert counts.num_accepted == sum(counts.accepted_per_position) < len(ids)
            await cluster.check_empty()
    assert answers[0] == answers[1]


async def test_special_tokens_stop_answers_and_are_text_on_request(small_model: Path) -> None:
    """Cases of vllm#2123 and strands#22, over the whole path from the client's options."""
    async with rig(small_model, *SMALL) as cluster:
        gateway = cluster.gateway

        async def complete(**options: object) -> tuple[list[int], str, str]:
            message = build_request("def f(", GenerateOptions(**options))  # type: ignore[typeddict-item]
            request = check_request(to_raw_request(message), gateway.model, gateway.tokenizer)
            ids, text, finished = await cluster.complete(request)
            return ids, text, finished.finish_reason

        for n in (0, 3):
            think: dict[str, object] = {"logit_bias": {2: 100.0}, "max_tokens": 3, "max_drafts": n}
            end: dict[str, object] = think | {"logit_bias": {1: 100.0}, "ignore_eos": True}
            assert await complete(**think) == ([2, 2, 2], "", "length")
            keep = think | {"skip_special_tokens": False}
            assert await complete(**keep) == ([2, 2, 2], "<think>" * 3, "length")
            assert await complete(**think, stop=["<think>"]) == ([2], "", "stop")
            assert await complete(**keep, stop=["><"]) == ([2, 2], "<think", "stop")
            assert await complete(**end, stop=["<｜end▁of▁sentence｜>"]) == ([1], "", "stop")
        await cluster.check_empty()


async def test_text_held_for_a_stop_string_survives_preemption(small_model: Path) -> None:
    """Answers migrate while nearly all of their text is a prefix of a stop string."""
    sets = ("kv.num_pages=26", "kv.page_size=8", "decode.max_num_seqs=6")
    asked = [greedy(f"r{i}", ids, 70, ignore_eos=True) for i, ids in enumerate(prompts(8))]
    async with rig(small_model, *SMALL) as cluster:
        texts = [(await cluster.complete(request))[1] for request in asked]
    for completes in (False, True):
        stops = [text[5:] + ("" if completes else "\0") for text in texts]
        held = [
            replace(request, sampling=replace(request.sampling, stop=(stop,)))
            for request, stop in zip(asked, stops, strict=True)
        ]
        async with rig(small_model, *sets) as cluster:
            preempted = watch(cluster)
            answers = await asyncio.gather(*(cluster.complete(request) for request in held))
            await cluster.check_empty()
        assert preempted
        expected = [text[:5] if completes else text for text in texts]
        assert [text for _, text, _ in answers] == expected
