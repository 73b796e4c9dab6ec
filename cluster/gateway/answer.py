"""State of one answer: tokens and text so far, and the messages made from them."""

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
    """Token ids, text and statistics of one answer, across all ranks that generate it.

    Text continues after the last complete character of ``request.output_ids``. Stop strings are
    detected here. Decode ranks already cut tokens at stop tokens and ``max_tokens``. Prefill ranks
    do not, so ``on_prefilled`` applies the same rule to the first token. If ``request.output_ids``
    are already a whole answer, this answer is finished from the start.

    Attributes:
        index: Index of this answer among the n of the request.
        max_output_tokens: Maximum number of output tokens, including resumed ones.
        finish_reason: None until the answer ends.
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
            num_prompt=len(request.prompt_ids),
            num_output=0,
            max_tokens=sampling.max_tokens,
            max_model_len=model.max_model_len,
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
        """Whether the answer has ended."""
        return self.finish_reason is not None

    def elapsed_ms(self) -> float:
        """Return the milliseconds since the answer was created."""
        return (time.monotonic() - self._started_at) * 1e3

    def on_prefilled(self, prefilled: PrefillReply) -> Delta:
        """Record the first token of an attempt and return the next piece."""
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
        """Record that the KV hand-over is complete.

        The recorded duration is the part of the hand-over after the end of prefill.
        """
        if len(self.token_ids) == 1:
            transfer_ms = self.elapsed_ms() - self._timings.first_token
            self._timings = replace(self._timings, transfer=transfer_ms)
        self._transfer += pulled

    def update(self, update: SequenceUpdate) -> Delta:
        """Record the outcome of one step and return the next piece.

        Raises:
            Preempted: The decode rank preempted the sequence.
        """
        if update.counts is not None:
            self._attempt_counts_before = self._attempt_counts
            self._attempt_counts = update.counts
        if update.finish_reason == PREEMPTED:
            raise Preempted(f"{update.identity} was preempted")
        self.finish_reason = update.finish_reason
        return self._delta(update)

    def remaining_request(self) -> Request:
        """Return a request that continues the answer after the tokens emitted so far."""
        output_ids = self.request.output_ids + tuple(self.token_ids)
        is_resumed = self.request.is_resumed or bool(self.token_ids)
        return replace(self.request, output_ids=output_ids, is_resumed=is_resumed)

    def _delta(self, update: PrefillReply | SequenceUpdate) -> Delta:
        """Return the next piece.

        A token that ended the answer is in the ids but not in the text. Tokens and text that follow
        a stop string are dropped.
        """
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
        """Continue after the tokens ``resumed``, which may already be a whole answer.

        Raises:
            ValueError: The tokens extend beyond the end of an answer.
        """
        if len(resumed) > self.max_output_tokens:
            remedy = f"an answer to this request has at most {self.max_output_tokens} tokens"
            refuse("len(resume_token_ids)", len(resumed), remedy)
        kept_ids, self.finish_reason = truncate_at_stop(
            resumed, self._stop_ids, self.max_output_tokens
        )
        if kept_ids != resumed:
            field = f"resume_token_ids[{len(kept_ids) - 1}]"
            refuse(field, kept_ids[-1], "ends the answer, but more tokens follow")
        self._text.push(resumed)
        if self._text.is_stopped:
            self.finish_reason = STOP

    def finish_aborted(self) -> Finished:
        """End the answer with reason abort and return its last piece."""
        self.finish_reason = ABORT
        return self.make_finished()

    def make_finished(self) -> Finished:
        """Return the last piece of the finished answer."""
        assert self.finish_reason is not None, "the answer has not ended yet"
        request = self.request
        assert request.sampling.seed is not None, "admission must have set a seed"
        return Finished(
            index=self.index,
            finish_reason=self.finish_reason,
            usage=Usage(len(request.prompt_ids), self._num_cached, len(self.token_ids)),
            speculation=self._previous_counts + self._attempt_counts,
            timings_ms=replace(self._timings, total=self.elapsed_ms()),
            kv_transfer=self._transfer,
            seed=request.sampling.seed,
        )
