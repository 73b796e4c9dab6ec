"""The cluster as one object: admits requests, routes them, and yields their answers.

A gateway owns no rank. Several gateways may serve one cluster. Each has a session with every decode
rank, which frees the resources of a gateway that dies.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakSet

from tandem.cluster.gateway.affinity import PrefixAffinity
from tandem.cluster.gateway.answer import Answer
from tandem.cluster.gateway.balance import balance_ratios
from tandem.cluster.gateway.fan_out import AnswerGroup, split_request
from tandem.cluster.gateway.fleet import ClusterMembers, Fleet
from tandem.cluster.gateway.flow import run_request
from tandem.cluster.gateway.handles import AttemptRoute
from tandem.cluster.gateway.recovery import AttemptHistory
from tandem.cluster.gateway.router import check_fit, choose_route
from tandem.core.answer import Piece
from tandem.core.config import TandemConfig
from tandem.core.errors import HandoverError, Overloaded, Preempted, RankLost, StepFailed
from tandem.core.identity import Identity
from tandem.core.info import DECODE, DEGRADED, NOT_SERVING, SERVING, RankStatus, ServerStatus
from tandem.core.request import Request, SamplingParams
from tandem.text.tokenizer import TextStream, Tokenizer

log = logging.getLogger(__name__)
WARM_UP_TOKENS = 3
SPARE_STREAMS = 64
"""Number of open streams allowed beyond the answers that run or wait for a row.

These are ended answers whose clients are still reading.
"""


class ClusterGateway:
    """Routes requests to ranks, and retries them on others after failures.

    Create it inside a running asyncio loop; ``fleet.stop`` ends its background tasks.

    Attributes:
        open_answers: Answer groups whose pieces are still being read.
        migrations: Number of retries, by the name of the error that ended the previous attempt.
        model: Served model, the same in all ranks and epochs.
    """

    def __init__(self, config: TandemConfig, tokenizer: Tokenizer, members: ClusterMembers) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._affinity = PrefixAffinity()
        self.open_answers: WeakSet[AnswerGroup] = WeakSet()

        self.migrations: Counter[str] = Counter()

        self.fleet = Fleet(members, config, self._send_warm_up)
        self.model = self.fleet.of_kind(DECODE)[0].info.model

    @property
    def max_streams(self) -> int:
        """Maximum number of open streams: answers that have or await a row, plus SPARE_STREAMS."""
        return self._num_rows() + self.config.server.max_queued + SPARE_STREAMS

    def check_queue(self, num_answers: int, is_resumed: bool = False) -> None:
        """Raise Overloaded if ``num_answers`` more answers could not be queued.

        Resumed answers have a reserve of one place per row of the cluster, because each had a row
        before.
        """
        num_reserved = self.config.decode.num_rows if is_resumed else 0
        num_queued = sum(map(len, self.open_answers)) - self._num_rows()
        if num_queued + num_answers > self.config.server.max_queued + num_reserved:
            raise Overloaded(
                f"{max(0, num_queued)} requests are already queued (server.max_queued)"
            )

    @property
    def proof_key(self) -> bytes:
        """Secret of the cluster with which gateways sign proofs; b"" for none."""
        return self.fleet.membership.proof_key

    def start_answers(self, request: Request) -> AnswerGroup:
        """Start generating the answers to ``request``. The caller must read their pieces at once.

        Reading them raises the errors of ``run_request``.

        Raises:
            Overloaded: The queue is full.
            ValueError: The request can never be served.
        """
        answers = [
            self._make_answer(index, answer_request)
            for index, answer_request in enumerate(split_request(request))
        ]
        if not all(answer.is_finished for answer in answers):
            self._admit(answers)
        self.open_answers.add(streams := AnswerGroup(answers, self._serve))
        return streams

    def _make_answer(self, index: int, request: Request) -> Answer:
        skips = request.sampling.skip_special_tokens
        text = TextStream(self.tokenizer, skip_special_tokens=skips)
        return Answer(request=request, text=text, model=self.model, index=index)

    def is_healthy(self) -> bool:
        """Whether there is a usable pair of a prefill and a decode rank."""
        return bool(self.fleet.usable_pairs())

    async def status(self, num_running: int) -> ServerStatus:
        """Return the cluster's status.

        ``num_running`` is the number of the server's open streams.
        """
        handles = list(self.fleet.ranks.values())
        ranks = await asyncio.gather(*(handle.status() for handle in handles))
        ratios = balance_ratios(handles)
        cold = self.fleet.cold_pair_causes()
        ranks = [
            replace(
                rank,
                cause=rank.cause or cold.get(handle, ""),
                balance_ratio=ratios.get(handle.info.spec.gang, 0.0),
            )
            for rank, handle in zip(ranks, handles, strict=True)
        ]
        unready = self.fleet.unready_gangs()
        ranks += [RankStatus(g.name, g.kind, g.epoch, False, cause=g.cause) for g in unready]
        at_best = DEGRADED if any(rank.cause for rank in ranks) else SERVING
        state = at_best if self.is_healthy() else NOT_SERVING
        return ServerStatus(
            state=state, mode=self.config.mode, num_running=num_running, ranks=tuple(ranks)
        )

    async def _send_warm_up(self, pair: AttemptRoute) -> None:
        """Run a tiny request on a pair of ranks.

        Raises ValueError if the ranks are incompatible.
        """
        check_fit(pair.prefill, pair.decode)
        sampling = SamplingParams(seed=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        request = Request(pair.identity.request_id, (0, 0), sampling=sampling)
        answer = self._make_answer(0, request)
        await run_request(
            request=request,
            pair=pair,
            session=self.fleet.session,
            answer=answer,
            emit=lambda piece: None,
        )

    def _num_rows(self) -> int:
        """Return the number of rows of all decode ranks that get requests."""
        return sum(r.info.max_rows for r in self.fleet.of_kind(DECODE) if r.liveness.is_well)

    def _admit(self, answers: Sequence[Answer]) -> None:
        """Raise an error for answers that do not fit into every rank or into the queue.

        An answer must fit into every prefill and decode rank, because it may migrate to any of
        them.

        Raises:
            Overloaded: The queue is full.
            ValueError: A rank has too few pages for an answer.
        """
        self.check_queue(len(answers), answers[0].request.is_resumed)
        infos = [handle.info for pair in self.fleet.usable_pairs() for handle in pair]
        max_tokens = len(answers[0].request.prompt_ids) + answers[0].max_output_tokens
        capacity = min((info.max_tokens for info in infos), default=max_tokens)
        if max_tokens > capacity:
            raise ValueError(
                f"max_tokens: prompt and answer may have {max_tokens} tokens, but a rank has pages "
                f"for {capacity}; lower max_tokens or raise kv.num_pages"
            )

    async def _serve(self, answer: Answer, emit: Callable[[Piece], None]) -> None:
        """Run attempts at an answer until it is finished.

        After a lost rank, a failed hand-over or a failed step, a few more attempts are made. After
        a preemption there is always another one. Resumed answers are also retried when the cluster
        is overloaded.
        """
        attempts = AttemptHistory(self.fleet)
        session = self.fleet.session

        def emit_piece(piece: Piece) -> None:
            attempts.retries.reset()
            emit(piece)

        while not answer.is_finished:
            pair = None
            try:
                remaining = answer.remaining_request()
                pair = await self._choose_route(remaining, answer.index, attempts)
                await run_request(
                    request=remaining, pair=pair, session=session, answer=answer, emit=emit_piece
                )
            except Preempted:
                self.migrations["Preempted"] += 1
            except (RankLost, HandoverError, StepFailed, Overloaded) as error:
                await attempts.on_failure(error, pair, answer.remaining_request().is_resumed)
                self.migrations[type(error).__name__] += 1
                log.warning(
                    "%s: trying again after failure %d: %s",
                    answer.request.request_id,
                    attempts.retries.num_failures,
                    error,
                )

    async def _choose_route(
        self, request: Request, index: int, attempts: AttemptHistory
    ) -> AttemptRoute:
        """Choose the ranks of the next attempt.

        Resumed answers wait for a usable pair if there is none. Pairs between which a hand-over of
        this answer failed are avoided if there are others.
        """
        pairs = await self.fleet.wait_for_pairs(
            self.config.server.recovery_timeout_s if request.is_resumed else 0.0
        )
        others = [pair for pair in pairs if pair not in attempts.avoided_pairs]
        token_ids = request.prompt_ids + request.output_ids
        known = self._affinity.find(token_ids)
        causes = [f"{gang.name}: {gang.cause}" for gang in self.fleet.unready_gangs()]
        prefill, decode = choose_route(
            pairs=others or pairs, num_tokens=len(token_ids), num_cached=known, causes=causes
        )
        self._affinity.remember(token_ids, prefill.epoch_name)
        return AttemptRoute(
            prefill=prefill,
            decode=decode,
            identity=Identity(request.request_id, index),
            is_suspect=attempts.is_suspect(),
        )
