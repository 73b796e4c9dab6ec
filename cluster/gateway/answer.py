"""What a request has been answered so far, and the messages made of it."""

import time
from dataclasses import replace

from tandem.cluster.gateway.checks import refuse
from tandem.core.answer import Delta, Finished, SpeculationCounts, Timings, TransferStats, Usage
from tandem.core.errors import Preempted
from tandem.core.info import ModelInfo
from tandem.core.request import ABORT, PREEMPTED, STOP, Request, SequenceUpdate
from tandem.core.stopping import remaining_budget, stop_ids, truncate_at_stop
from tandem.prefill_node.prefill_calls import PrefillReply
from tandem.text.stop_text import AnswerText
from tandem.text.tokenizer import TextStream


class Answer:
    """Token ids, text and figures of one request, across the nodes that wrote it; ``index`` is
    which of the n answers of the user's request it is, ``max_output_tokens`` how many tokens it may
    have.

    Text goes on where the complete characters of ``request.output_ids`` end. Tokens arrive
    already cut at a stop, except the first one, which no decode node has seen: ``prefilled``
    applies the same rule to it. Stop strings are found here. If ``request.output_ids`` are a whole
    answer it is finished from the start.
    """

    def __init__(
        self, request: Request, text: TextStream, model: ModelInfo, index: int = 0
    ) -> None:
        self.request = request
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        sampling = request.sampling
        self._text = AnswerText(text, sampling.stop, sampling.min_tokens)
        self._stop_ids = stop_ids(sampling, model.eos_token_ids)
        self.max_output_tokens = remaining_budget(
            len(request.prompt_ids), 0, sampling.max_tokens, model.max_model_len
        )
        self._resume(request.output_ids)
        self._previous_counts = self._attempt_counts = self._attempt_counts_before = (
            SpeculationCounts()
        )
        self._transfer = TransferStats()
        self._started_at = time.monotonic()
        self._num_cached = 0
        self._timings = Timings()

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def elapsed_ms(self) -> float:
        return (time.monotonic() - self._started_at) * 1e3

    def on_prefilled(self, prefilled: PrefillReply) -> Delta:
        """The first token is here: the next piece."""
        self._previous_counts += self._attempt_counts
        self._attempt_counts = self._attempt_counts_before = SpeculationCounts()
        if not self.token_ids:
            self._num_cached = min(prefilled.num_cached, len(self.request.prompt_ids))
            times = prefilled.queue_ms, prefilled.prefill_ms, 0.0, self.elapsed_ms()
            self._timings = Timings(*times)
        num_left = self.max_output_tokens - len(self.request.output_ids) - len(self.token_ids)
        _, self.finish_reason = truncate_at_stop(prefilled.token_ids, self._stop_ids, num_left)
        return self._delta(prefilled)

    def on_pulled(self, pulled: TransferStats) -> None:
        """The hand-over is complete; what of it was not hidden behind prefill is its time."""
        if len(self.token_ids) == 1:
            transfer_ms = self.elapsed_ms() - self._timings.first_token
            self._timings = replace(self._timings, transfer=transfer_ms)
        self._transfer += pulled

    def update(self, update: SequenceUpdate) -> Delta:
        """The next piece, of one step's outcome. Raises Preempted when the decode rank gave the
        answer up."""
        if update.counts is not None:
            self._attempt_counts_before, self._attempt_counts = self._attempt_counts, update.counts
        if update.finish_reason == PREEMPTED:
            raise Preempted(f"{update.identity} was preempted")
        self.finish_reason = update.finish_reason
        return self._delta(update)

    def remaining_request(self) -> Request:
        """What is left to do, as a request: it goes on after the tokens emitted so far."""
        output_ids = self.request.output_ids + tuple(self.token_ids)
        is_resumed = self.request.is_resumed or bool(self.token_ids)
        return replace(self.request, output_ids=output_ids, is_resumed=is_resumed)

    def _delta(self, update: PrefillReply | SequenceUpdate) -> Delta:
        """A token that ended the answer is in the ids, not in the text, and what follows a stop
        string is in neither."""
        token_ids = update.token_ids
        ended_by_token = self.finish_reason == STOP and token_ids[-1] in self._stop_ids
        text, num_shown = self._text.push(token_ids[:-1] if ended_by_token else token_ids)
        if self._text.is_stopped:
            self.finish_reason = STOP
            token_ids = token_ids[:num_shown]
            self._attempt_counts = self._attempt_counts.truncate_last_run(
                self._attempt_counts_before, num_shown
            )
        elif self.is_finished:
            text += self._text.finish()
        self.token_ids.extend(token_ids)
        return Delta(self.index, token_ids, text, update.logprobs[: len(token_ids)])

    def _resume(self, resumed: tuple[int, ...]) -> None:
        """Go on after these tokens; they may be a whole answer, ``ValueError`` if they are more."""
        if len(resumed) > self.max_output_tokens:
            remedy = f"an answer to this request has at most {self.max_output_tokens} tokens"
            refuse("len(resume_token_ids)", len(resumed), remedy)
        kept, self.finish_reason = truncate_at_stop(resumed, self._stop_ids, self.max_output_tokens)
        if kept != resumed:
            field = f"resume_token_ids[{len(kept) - 1}]"
            refuse(field, kept[-1], "ends the answer, but more tokens follow")
        self._text.push(resumed)
        if self._text.is_stopped:
            self.finish_reason = STOP

    def finish_aborted(self) -> Finished:
        """The end of an answer that was cut short from outside."""
        self.finish_reason = ABORT
        return self.make_finished()

    def make_finished(self) -> Finished:
        assert self.finish_reason is not None, "the answer goes on"
        request = self.request
        assert request.sampling.seed is not None, "a seed is given at admission"
        return Finished(
            index=self.index,
            finish_reason=self.finish_reason,
            usage=Usage(len(request.prompt_ids), self._num_cached, len(self.token_ids)),
            speculation=self._previous_counts + self._attempt_counts,
            timings_ms=replace(self._timings, total=self.elapsed_ms()),
            kv_transfer=self._transfer,
            seed=request.sampling.seed,
        )
