"""Requests, sampling options and sequence updates: immutable data that nodes exchange.

A *request* is the input of one user call. A *sequence* is its state on one node, a pure function of
(request, output token ids). For this reason ``prompt_ids`` and ``output_ids`` stay separate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.answer import SpeculationCounts, TokenLogprobs
from tandem.core.heartbeat import Heartbeat
from tandem.core.identity import Identity
from tandem.core.schema import Failure

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
"""The finish reasons, spelled as on the wire."""
PREEMPTED = "preempted"
"""Internal finish reason: a decode rank preempted the sequence.

The sequence resumes from its emitted tokens. Users never see this reason.
"""

STRICT, RELAXED, RELAXED_LOG_PROBS = "strict", "relaxed", "relaxed_log_probs"
REJECTION, REJECTION_GREEDY, TYPICAL = "rejection", "rejection_greedy", "typical"
ACCEPTANCES = (STRICT, RELAXED, REJECTION, RELAXED_LOG_PROBS, REJECTION_GREEDY, TYPICAL)
"""Acceptance rules, in the order of the protobuf enum ``Acceptance``.

Names are those of the enum in lower case, without its prefix.
"""


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A bias that is added to the logit of ``token_id``."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options for how tokens are chosen and when an answer ends.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: None is replaced by a random seed at admission.
        min_tokens: Minimum number of tokens before an answer may end.
        max_tokens: Maximum number of emitted tokens.
        logprobs: Number of most likely tokens reported per position; None: no log probabilities.
        n: Number of answers. Only the gateway sees more than one.
        skip_special_tokens: Whether special tokens are omitted from the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[TokenBias, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 128
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties, biases or ``min_tokens`` change the logits before sampling."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """Options for drafting and for the acceptance of drafts.

    The relaxed rules apply while the model thinks. They accept a draft among the ``relaxed_top_n``
    most likely tokens that is at most ``relaxed_delta`` less likely than the best one. Typical
    acceptance takes a draft whose probability exceeds ``typical_epsilon`` or ``typical_alpha`` *
    exp(-entropy).

    Attributes:
        max_drafts: Maximum draft depth; None: the server's ``speculation.max_depth``; 0: no
            drafting.
        acceptance: Name of the acceptance rule.
    """

    max_drafts: int | None = None
    acceptance: str = STRICT
    relaxed_top_n: int = 1
    relaxed_delta: float = 0.0
    typical_epsilon: float = 0.09
    typical_alpha: float = 0.3


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a user, as the ranks receive it.

    Attributes:
        output_ids: Tokens of the answer that were emitted earlier. The answer continues after them.
            Empty for a new request.
        is_resumed: Whether this cluster has verifiably emitted tokens of the answer: this gateway
            emitted them, or the client sent a proof. Such a request has priority over new ones.
            ``output_ids`` alone give no priority, because a client can send any tokens.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as an entrypoint received it: types are correct, values are not validated.

    Options that the client omitted hold their defaults, and so do options set to 0 where 0 means
    the default.

    Attributes:
        prompt: Text or token ids; may be a view of the entrypoint's memory.
        request_id: "" if the gateway is to generate one.
        resume_token_ids: Output tokens that the client already has. They become
            ``Request.output_ids``; may be a view too.
        resume_model: Digest of the model that generated ``resume_token_ids``, "" if unknown.
        resume_proof: Proof that the cluster started this answer, "" for none.
    """

    prompt: str | Sequence[int] | None = None
    request_id: str = ""
    resume_token_ids: Sequence[int] = ()
    resume_model: str = ""
    resume_proof: str = field(default="", repr=False)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """Result of one step for one sequence.

    Attributes:
        finish_reason: None while the sequence continues.
        failure: Set with the finish reason ERROR.
        counts: Totals of the sequence so far, sent with its last update; None otherwise. If the
            request has stop strings, every update has them, because the gateway may end the answer.
    """

    identity: Identity
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    failure: Failure | None = None
    counts: SpeculationCounts | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """Updates of one step for all sequences of a gateway's session.

    ``heartbeat`` is the reply to a heartbeat of the gateway; None if there is none to reply to.
    """

    updates: tuple[SequenceUpdate, ...] = ()
    heartbeat: Heartbeat | None = None
