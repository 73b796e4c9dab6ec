"""Prefill node, decode node and gateway with real channels between them, in one process.

Answers are compared with transformers, and nothing may be left behind after any failure.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from benchmarks.harness.held_out import held_out
from tandem.cluster.gateway.admission import Admission
from tandem.core.answer import Delta, Finished, Piece, TransferStats
from tandem.core.config import TINY_MODEL
from tandem.core.control import Empty, InProcessControl
from tandem.core.errors import HandoverError, LayoutMismatch, Overloaded, RankLost
from tandem.core.identity import Identity
from tandem.core.info import DECODE, DEGRADED, NOT_SERVING, PREFILL, SERVING
from tandem.core.membership import DOWN, Gang, RankSpec
from tandem.core.request import RawRequest, Request, SamplingParams
from tandem.core.schema import Failure, pack
from tandem.core.schema import decode as decode_reply
from tandem.decode_node.planning.states import RequestSize
from tandem.decode_node.service.decode_calls import Grant, StartSequence
from tandem.decode_node.service.rank import REMEMBER_ABORTS_S
from tandem.kv_transfer.layout import PROTOCOL
from tandem.kv_transfer.messages import Offer
from tests.rig import Rig, rig, stop_all
from tests.waiting import for_ever, turns, until

SMALL = ("kv.num_pages=200", "kv.page_size=16")


def prompts(num: int, min_len: int = 5, max_len: int = 90, seed: int = 1) -> list[list[int]]:
    return held_out(num, min_len, max_len, seed)


def sampled(request_id: str, ids: list[int], max_tokens: int, **changes: object) -> Request:
    request = greedy(request_id, ids, max_tokens, ignore_eos=True)
    changes = {"temperature": 0.9, "seed": 5} | changes
    return replace(request, sampling=replace(request.sampling, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("mode=colocated",),
        ("prefill.max_num_batched_tokens=16", "kv_transfer.staging_bytes=262144"),
    ],
    ids=lambda sets: " ".join(sets) or "disaggregated",
)
async def test_answers_of_the_shipped_checkpoint_are_exact(sets: tuple[str, ...]) -> None:
    """The third case prefills in chunks of two tokens."""
    await check_exact(TINY_MODEL, sets)


@pytest.mark.parametrize(
    "sets",
    [
        ("speculation.handover_hidden=false",),
        ("prefill.replicas=2", "decode.replicas=2"),
        ("speculation.drafter=none",),
    ],
    ids=" ".join,
)
async def test_answers_are_exact(small_model: Path, sets: tuple[str, ...]) -> None:
    await check_exact(small_model, sets)


async def check_exact(path: Path, sets: tuple[str, ...]) -> None:
    async with rig(path, *SMALL, *sets) as cluster:
        asked = [
            greedy(f"r{i}", ids, 24, max_drafts=i % 4, ignore_eos=True)
            for i, ids in enumerate(prompts(8))
        ]
        answers = await asyncio.gather(*(cluster.complete(request) for request in asked))
        for request, (ids, text, finished) in zip(asked, answers, strict=True):
            assert finished.finish_reason == "length" and len(ids) == 24
            assert not near_ties(path, list(request.prompt_ids), ids)
            assert text == cluster.gateway.tokenizer.decode(ids)
            check_figures(cluster, request, finished)
        await cluster.check_empty()


def check_figures(cluster: Rig, request: Request, finished: Finished) -> None:
    counts, transfer = finished.speculation, finished.kv_transfer
    most = 1 + counts.num_steps + counts.num_accepted
    assert most - 1 <= finished.usage.completion <= most, "a cut last run has no own token"
    assert sum(counts.accepted_per_position) == counts.num_accepted
    num_layers, width = (10, 576) if cluster.config.model.path == TINY_MODEL else (2, 48)
    num_layers += bool(cluster.decodes[0].info.model.num_draft_tokens)
    assert transfer.tokens == len(request.prompt_ids)
    crossed = 0 if cluster.config.mode == "colocated" else num_layers * width * 4
    assert transfer.bytes == len(request.prompt_ids) * crossed
    assert finished.timings_ms.total >= finished.timings_ms.first_token > 0
    if not counts.num_drafted:
        assert counts.num_accepted == 0


async def test_sampled_output_depends_on_the_seed_alone(small_model: Path) -> None:
    """Output does not depend on n, batch, split or chunking, and different seeds differ."""
    [ids] = prompts(1)
    answers = set()
    for sets in ((), ("mode=colocated", "prefill.max_num_batched_tokens=7")):
        async with rig(small_model, *SMALL, *sets) as cluster:
            asked = [
                replace(sampled(f"r{n}", ids, 30), speculation=replace(
                    greedy("x", ids, 1).speculation, max_drafts=n))
                for n in (0, 1, 3)
            ]  # fmt: skip
            done = await asyncio.gather(*(cluster.complete(request) for request in asked))
            answers |= {tuple(tokens) for tokens, _, _ in done}
            other, _, _ = await cluster.complete(sampled("other", ids, 30, seed=6))
            await cluster.check_empty()
    assert len(answers) == 1
    assert tuple(other) not in answers


async def test_a_missing_seed_is_drawn_and_told(small_model: Path) -> None:
    [ids] = prompts(1)
    async with rig(small_model, *SMALL) as cluster:
        tokens, _, finished = await cluster.complete(sampled("a", ids, 20, seed=None))
        again, _, _ = await cluster.complete(sampled("b", ids, 20, seed=finished.seed))
        assert tokens == again
        await cluster.check_empty()


async def test_resume_continues_where_an_answer_stopped(small_model: Path) -> None:
    [ids] = prompts(1)
    async with rig(small_model, *SMALL) as cluster:
        for make in (greedy, sampled):
            whole, _, _ = await cluster.complete(make("whole", ids, 24))
            for cut in (1, 7, 23):
                request = replace(make("rest", ids, 24), output_ids=tuple(whole[:cut]))
                rest, _, finished = await cluster.complete(request)
                assert whole[:cut] + rest == whole
                assert finished.usage.completion == len(rest)
        await cluster.check_empty()


async def test_an_answer_of_one_token_needs_no_hand_over(small_model: Path) -> None:
    [ids] = prompts(1)
    async with rig(small_model, *SMALL) as cluster:
        tokens, _, finished = await cluster.complete(greedy("r", ids, 1))
        assert len(tokens) == 1 and finished.finish_reason == "length"
        assert finished.kv_transfer.bytes == 0
        stopped, text, finished = await cluster.complete(
            greedy("s", ids, 9, stop_token_ids=(tokens[0],))
        )
        assert (stopped, text, finished.finish_reason) == (tokens, "", "stop")
        await cluster.check_empty()


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 3])
async def test_closing_the_stream_frees_everything(small_model: Path, num_pieces: int) -> None:
    [ids] = prompts(1, 60, 80)
    async with rig(small_model, *SMALL, "prefill.max_num_batched_tokens=8") as cluster:
        prefilling = cluster.prefills[0].engine.scheduler.sequences
        decoding = cluster.decodes[0].engine.scheduler.sequences
        for round_number in range(3):
            stream = cluster.generate(greedy(f"r{round_number}", ids, 60))
            if num_pieces == 0:
                task = asyncio.create_task(anext(stream))
                has_begun = (cluster.gateway.open_answers, prefilling, decoding)[round_number]
                await until(lambda t=task, begun=has_begun: t.done() or begun)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            for _ in range(num_pieces):
                await anext(stream)
            await stream.aclose()
        await cluster.check_empty()
        assert not sum(map(len, cluster.gateway.open_answers))


async def test_an_abort_that_overtakes_its_calls_wins(small_model: Path) -> None:
    """Calls that arrive after the abort, and after sweeps, are refused. No row stays, and nothing
    is pulled into freed pages."""
    [ids] = prompts(1)
    async with rig(small_model, *SMALL) as cluster:
        [decode], owner = cluster.decodes, cluster.prefills[0]
        control = InProcessControl(decode.handle, decode.spec.epoch)

        async def call(method: str, message: object, reply: type) -> object:
            return decode_reply(reply, await control.call(method, pack(message)))

        for i in range(5):
            identity = Identity(f"r{i}")
            grant = Grant(identity, 1, RequestSize(len(ids), 0, 5))
            offer = Offer(
                PROTOCOL, owner.spec.epoch_name, owner.spec.rank_name, owner.spec.epoch, identity,
                decode.info.caches,
                len(ids),
            )  # fmt: skip
            start = StartSequence(identity, greedy(f"r{i}", ids, 5), offer)
            if i % 2:
                asking = asyncio.create_task(call("grant", grant, Empty))
                await asyncio.sleep(0)
            await call("abort", identity, Empty)
            await decode._sweep()
            if i % 2:
                with pytest.raises(HandoverError, match="aborted while it waited"):
                    await asking
            for message in (("grant", grant, Empty), ("start", start, TransferStats)):
                with pytest.raises(HandoverError, match="aborted before this call arrived"):
                    await call(*message)
            assert not decode._arrivals and not decode._pending_grants
        now = asyncio.get_running_loop().time
        decode._recently_ended._clock = lambda: now() + REMEMBER_ABORTS_S + 1
        await decode._sweep()
        assert not len(decode._recently_ended), "nor is it remembered for ever"
        tokens, _, _ = await cluster.complete(greedy("next", ids, 5, ignore_eos=True))
        assert len(tokens) == 5
        await cluster.check_empty()


async def test_another_life_of_a_rank_is_not_meant(small_model: Path) -> None:
    async with rig(small_model, *SMALL) as cluster:
        for rank in (*cluster.prefills, *cluster.decodes):
            control = InProcessControl(rank.handle, rank.spec.epoch - 1)
            with pytest.raises(RankLost, match=f"this rank is in epoch {rank.spec.epoch}"):
                decode_reply(Empty, await control.call("ping", b""))


async def test_a_rank_that_joins_serves_and_one_that_leaves_is_let_go(small_model: Path) -> None:
    """The membership alone decides this. Answers that ran on the leaving rank migrate."""
    async with rig(small_model, *SMALL, "decode.max_num_seqs=2") as cluster:
        asked = [greedy(f"r{i}", ids, 80, ignore_eos=True) for i, ids in enumerate(prompts(4))]
        running = [asyncio.create_task(cluster.complete(request)) for request in asked]
        first = cluster.decodes[0]
        [second] = await cluster.start(replace(first.spec, gang="decode-1", epoch=7))
        await until(lambda: len(cluster.gateway.fleet.usable_pairs()) == 2)
        cluster.members.remove(first.spec.epoch_name)
        for request, (ids, _, _) in zip(asked, await asyncio.gather(*running), strict=True):
            assert len(ids) == 80 and not near_ties(small_model, list(request.prompt_ids), ids)
        assert [d.epoch_name for d in cluster.gateway.fleet.of_kind("decode")] == [
            second.spec.epoch_name
        ]
        assert second.engine.num_steps > 0
        assert (await cluster.gateway.status(0)).state == SERVING
        down = Gang("decode-9", DECODE, 3, DOWN, failure=Failure("ValueError", "it is gone\nlog"))
        cluster.members.tell(*cluster.members.membership.gangs, down)
        status = await cluster.gateway.status(0)
        nodes = {node.name: (node.alive, node.cause) for node in status.ranks}
        assert nodes.pop("decode-9") == (False, "down; last epoch ended: it is gone")
        assert nodes == {"prefill-0": (True, ""), "decode-1": (True, "")}
        assert status.state == DEGRADED and cluster.gateway.is_healthy()
        await cluster.check_empty()
        cluster.members.tell(*(g for g in cluster.members.membership.gangs if g.kind == PREFILL))
        await until(lambda: not cluster.gateway.is_healthy())
        assert (await cluster.gateway.status(0)).state == NOT_SERVING
        await cluster.gateway.fleet.stop()
        await second.stop()


async def test_abort_ends_the_stream_with_its_reason(small_model: Path) -> None:
    [ids] = prompts(1)
    async with rig(small_model, *SMALL) as cluster:
        pieces = []
        async for piece in cluster.generate(greedy("r", ids, 100, ignore_eos=True)):
            pieces.append(piece)
            if len(pieces) == 2:
                cluster.begun["r"].abort()
        assert isinstance(pieces[-1], Finished) and pieces[-1].finish_reason == "abort"
        num_updates = sum(len(p.token_ids) for p in pieces if isinstance(p, Delta))
        assert pieces[-1].usage.completion == num_updates < 100
        assert not len(cluster.begun["r"])
        await cluster.check_empty()


async def test_more_requests_than_rows_wait_their_turn(small_model: Path) -> None:
    async with rig(small_model, *SMALL, "decode.max_num_seqs=2", "server.max_queued=5") as cluster:
        asked = [greedy(f"r{i}", ids, 6) for i, ids in enumerate(prompts(9))]
        done = await asyncio.gather(
            *(cluster.complete(request) for request in asked), return_exceptions=True
        )
        refused = [d for d in done if isinstance(d, BaseException)]
        assert all(isinstance(error, Overloaded) for error in refused)
        assert len(refused) == 2, "two run, five wait, two are refused"
        await cluster.check_empty()


async def test_requests_that_can_never_fit_are_refused_and_nothing_is_lost(
    small_model: Path,
) -> None:
    async with rig(small_model, "kv.num_pages=9", "kv.page_size=16") as cluster:
        [ids] = prompts(1, 40, 50)
        with pytest.raises(ValueError, match=r"max_tokens.*pages"):
            await cluster.complete(greedy("long answer", ids, 500))
        with pytest.raises(ValueError, match=r"prompt.*pages|max_tokens.*pages"):
            await cluster.complete(greedy("long prompt", ids * 4, 2))
        tokens, _, _ = await cluster.complete(greedy("fits", ids, 8, ignore_eos=True))
        assert not near_ties(small_model, ids, tokens)
        await cluster.check_empty()


@pytest.mark.parametrize("drafter", ["ngram", "none"])
async def test_a_decode_node_takes_no_more_than_its_drafter_reads(
    small_model: Path, drafter: str
) -> None:
    """The prefill node has MTP. With n-grams or no drafter, the decode node needs only the main
    caches."""
    [ids] = prompts(1)
    async with rig(small_model, *SMALL, "kv_transfer.checksums=true") as cluster:
        [own] = cluster.decodes
        asked = cluster.config.speculation.model_copy(update={"drafter": drafter})
        cluster.config = cluster.config.model_copy(update={"speculation": asked})
        ranks = await cluster.start(RankSpec("other", DECODE, own.spec.epoch))
        try:
            cluster.members.remove(own.spec.epoch_name)
            fleet = cluster.gateway.fleet
            await until(lambda: [d.info.drafter for _, d in fleet.usable_pairs()] == [drafter])
            tokens, _, finished = await cluster.complete(greedy("r", ids, 20, ignore_eos=True))
            assert (finished.speculation.num_drafted > 0) == (drafter == "ngram")
            assert not near_ties(small_model, ids, tokens)
            await cluster.check_empty()
        finally:
            await stop_all(ranks)
            cluster.members.add(own)


async def test_lives_that_end_while_a_gateway_begins_are_no_error_of_it(small_model: Path) -> None:
    """The gateway waits for the existing pairs to be warm. This pair leaves before it is."""
    async with rig(small_model, *SMALL) as cluster:
        [own], fleet = cluster.decodes, cluster.gateway.fleet
        cluster.members.remove(own.spec.epoch_name)
        await until(lambda: not fleet.of_kind(DECODE))
        warm, fleet._send_warm_up = fleet._send_warm_up, lambda pair: for_ever()
        cluster.members.add(own)
        await until(lambda: fleet.of_kind(DECODE))
        begins = asyncio.create_task(fleet.wait_until_warm())
        await turns()
        cluster.members.remove(own.spec.epoch_name)
        await asyncio.wait([begins])
        assert not begins.cancelled() and begins.exception() is None
        fleet._send_warm_up = warm
        cluster.members.add(own)
        await until(fleet.usable_pairs)
        await cluster.check_empty()


async def test_drafters_that_do_not_fit_are_refused_with_both_names(small_model: Path) -> None:
    """MTP on decode nodes reads a cache that prefill nodes without it do not have."""
    async with (
        rig(small_model, *SMALL) as mtp,
        rig(small_model, *SMALL, "speculation.drafter=none") as plain,
    ):
        [ids] = prompts(1)
        own, other = plain.decodes[0], mtp.decodes[0]
        plain.members.remove(own.spec.epoch_name)
        plain.members.add(other)
        fleet = plain.gateway.fleet
        await until(
            lambda: [one.epoch_name for one in fleet.of_kind(DECODE)] == [other.spec.epoch_name]
        )
        told = r"prefill.*\(drafter none\), decode.*\(drafter mtp\): .* needs mtp: .*features"
        with pytest.raises(ValueError, match=told):
            await fleet.wait_until_warm()
        with pytest.raises(
            RankLost, match="no compatible pair of prefill and decode ranks is available"
        ):
            await plain.complete(greedy("routed", ids, 5))
        identity, owner = Identity("forced"), plain.prefills[0]
        control = plain.members.controls[other.spec.epoch_name]
        mtp.members.controls[owner.spec.epoch_name] = InProcessControl(
            owner.handle, owner.spec.epoch
        )
        await control.call("grant", pack(Grant(identity, 1, RequestSize(len(ids), 0, 5))))
        for caches in (owner.info.caches, other.info.caches):
            place = owner.spec.epoch_name, owner.spec.rank_name, owner.spec.epoch
            offer = Offer(PROTOCOL, *place, identity, caches, len(ids))
            start = pack(StartSequence(identity, greedy("forced", ids, 5), offer))
            with pytest.raises((LayoutMismatch, HandoverError)):
                decode_reply(TransferStats, await control.call("start", start))
        await control.call("abort", pack(identity))
        plain.members.remove(other.spec.epoch_name)
        plain.members.add(own)
        await until(plain.gateway.is_healthy)
        tokens, _, _ = await plain.complete(greedy("served", ids, 5, ignore_eos=True))
        assert len(tokens) == 5
        await mtp.check_empty()
        await plain.check_empty()


async def test_a_request_id_may_run_once(small_model: Path) -> None:
    [ids] = prompts(1)
    async with rig(small_model, *SMALL) as cluster:
        admission, pieces = Admission(cluster.config), list[Piece]()
        await admission.attach(cluster.gateway)
        asked = RawRequest(ids, "same", sampling=SamplingParams(max_tokens=50, ignore_eos=True))

        async def write(piece: Piece) -> None:
            if not pieces:
                with pytest.raises(ValueError, match="a request with this id is running"):
                    await admission.answer(asked, write)
            pieces.append(piece)

        await admission.answer(asked, write)
        assert isinstance(pieces[-1], Finished) and pieces[-1].finish_reason == "length"
        await cluster.check_empty()


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    async def start() -> None:
        async with rig(tmp_path / "nowhere"):
            raise AssertionError("started without a checkpoint")

    with pytest.raises(ValueError, match="nowhere"):
        asyncio.run(start())
