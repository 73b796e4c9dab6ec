"""Applications that use the typed client, and their reactions to its errors."""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import grpc

from tandem.cluster.client.stream import InferenceError, StreamPlan
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.answer import Delta
from tests.sim.clients import BACKOFF_S, RETRY_S, Client
from tests.sim.model import WEIGHTS
from tests.sim.requests import Order
from tests.sim.world import World

REFUSED, ELSEWHERE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION


@dataclass(eq=False)
class Answer:
    """Output received for one answer of a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


class Application(Client):
    """Sends one request until it is answered, handling the typed client's errors like an
    application.

    An undocumented error, or one that no fault explains, is reported as a failure.
    """

    def __init__(self, number: int, order: Order, world: World, draw: random.Random) -> None:
        self.number, self.order, self._num_sent = number, order, 0
        self._world, self._draw = world, draw
        super().__init__(number, self._plan({}), ())
        self.model, self._failing_since = "", math.inf
        self.answers: dict[int, Answer] = defaultdict(Answer)

    def pause_after(self, failure: InferenceError | None) -> float:
        """Return the pause before the next stream. Raises an error that the application cannot
        handle."""
        self._failing_since = min(self._failing_since, self._world.loop.time())
        try:
            return super().pause_after(failure)
        except InferenceError as error:
            return self._act_on(error)

    def take(self, response: pb.GenerateResponse) -> str:
        """Process a message; return the description of a fault in it, or ""."""
        piece = self.plan.receive(response)
        self.model, self._failing_since = self.model or response.model, math.inf
        answer = self.answers[piece.index]
        if isinstance(piece, Delta):
            answer.token_ids += piece.token_ids
            answer.text += piece.text
            num_logprobs = 0 if self.order.options.get("logprobs") is None else len(piece.token_ids)
            if len(piece.logprobs) != num_logprobs:
                return f"got {len(piece.logprobs)} log probabilities of {num_logprobs}"
        else:
            answer.finish_reason = piece.finish_reason
        return self._wrong_with(piece.index, answer)

    def _wrong_with(self, index: int, answer: Answer) -> str:
        right = self.order.right(index, self.model or WEIGHTS)
        num, is_over = len(answer.token_ids), bool(answer.finish_reason)
        is_right = (
            tuple(answer.token_ids) == right.token_ids[:num]
            and right.text.startswith(answer.text)
            and (
                not is_over
                or (num, answer.text, answer.finish_reason)
                == (len(right.token_ids), right.text, right.finish_reason)
            )
        )
        return "" if is_right else f"got {answer} of index {index}, right is {right}"

    def _act_on(self, error: InferenceError) -> float:
        """Send the request again. A single answer resumes with its tokens, unless another model
        wrote them."""
        has_begun = any(answer.token_ids for answer in self.answers.values())
        is_single, can_resume = self.order.num_answers == 1, bool(error.token_ids)
        pause_s = self._draw.uniform(1.0, 2.0)
        failing_s = self._world.loop.time() - self._failing_since
        is_lost = has_begun and is_single and failing_s < RETRY_S
        if error.code == REFUSED and error.retry_after_s is not None and not is_lost:
            pause_s *= error.retry_after_s
        elif error.code == ELSEWHERE:
            if len(self._world.digests) == 1:
                raise error
            can_resume = False
        elif error.code != grpc.StatusCode.UNAVAILABLE or not self._may_give_up(has_begun):
            raise error
        self._world.told("sent anew", self.number, error.code.name)
        self._renew(error, can_resume and is_single)
        return pause_s

    def _may_give_up(self, has_begun: bool) -> bool:
        """Whether UNAVAILABLE may reach an application.

        It may if several answers had started, or if the cluster was not healthy for as long as the
        typed client retries.
        """
        several = has_begun and self.order.num_answers > 1
        return several or self._world.loop.time() - self._world.well_since < RETRY_S

    def _renew(self, error: InferenceError, resumes: bool) -> None:
        resumed: dict[str, Any] = {}
        if resumes:
            resumed = {"resume_token_ids": error.token_ids, "resume_model": error.model}
        else:
            self.answers.clear()
            self.model = ""
        self.plan = self._plan(resumed)

    def _plan(self, resumed: dict[str, Any]) -> StreamPlan:
        """Return a stream with a new name: the previous stream may still be open at some
        gateway."""
        self._num_sent += 1
        name = {"request_id": f"r{self.number}-{self._num_sent}"}
        options: Any = self.order.options | resumed | name
        return StreamPlan(self.order.prompt, options, RETRY_S, BACKOFF_S)
