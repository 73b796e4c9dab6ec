"""The nouns that cross nodes, all frozen.

A *request* is what a user sent. A *sequence* is its state on one node, and is a pure
function of (request, output token ids): so ``prompt_ids`` and ``output_ids`` stay apart.
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
"""A decode rank gave a sequence up for others; it goes on from what it has emitted. Users never
see this reason."""

STRICT, RELAXED, RELAXED_LOG_PROBS = "strict", "relaxed", "relaxed_log_probs"
REJECTION, REJECTION_GREEDY, TYPICAL = "rejection", "rejection_greedy", "typical"
ACCEPTANCES = (STRICT, RELAXED, REJECTION, RELAXED_LOG_PROBS, REJECTION_GREEDY, TYPICAL)
"""The kinds of acceptance, spelled and in order as on the wire, but for case and prefix."""


@dataclass(frozen=True, slots=True)
class TokenBias:
    """``bias`` is added to the logit of ``token_id``."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when they end.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. ``seed`` None is
    replaced by a random one at admission. ``max_tokens`` counts every emitted token; no
    answer ends before ``min_tokens``. Special tokens have no text unless ``skip_special_tokens``
    is False. ``logprobs`` is how many of the likeliest tokens to tell
    at each place besides the token itself, None for no log probabilities at all.
    ``n`` answers: only the gateway sees more than one.
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
        """Whether tokens are chosen from anything but the raw logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """``max_drafts`` None means the server's ``speculation.max_depth``; 0 turns it off.

    ``acceptance`` names the rule that drafts are judged by. The relaxed ones accept, while the
    model thinks, a draft among the ``relaxed_top_n`` likeliest tokens that is at most
    ``relaxed_delta`` less likely than the best. Typical acceptance takes a draft more probable than
    ``typical_epsilon``, or than ``typical_alpha`` * exp(-entropy).
    """

    max_drafts: int | None = None
    acceptance: str = STRICT
    relaxed_top_n: int = 1
    relaxed_delta: float = 0.0
    typical_epsilon: float = 0.09
    typical_alpha: float = 0.3


@dataclass(frozen=True, slots=True)
class Request:
    """``output_ids`` are tokens already emitted elsewhere (resume); empty at first.

    The answer ``is_resumed`` if this cluster knows that it has emitted tokens of it: its gateway
    did, or its client has a proof. It goes ahead of fresh requests. Whether there are
    ``output_ids`` does not matter, because a client can claim any.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as a entrypoint took it: the types are right, no value has been looked at.

    ``prompt`` is text or token ids, ``resume_token_ids`` will be ``output_ids``; both may be views
    of what the entrypoint owns. ``resume_model`` is the digest of the model that wrote them, "" if
    it is not known. ``resume_proof`` is the proof from their stream, "" for none. A ``request_id``
    of "" is to be made up. What the entrypoint was not given, or as a 0 that stands for the
    default, is the default.
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
    """What one step gave one sequence. ``finish_reason`` None while it goes on; ``counts`` come
    with the last update, with each where a stop string may end the answer elsewhere. ``failure``
    comes with the reason ERROR."""

    identity: Identity
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    failure: Failure | None = None
    counts: SpeculationCounts | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """What one step gave the sequences of one session; ``beat`` answers a heartbeat."""

    updates: tuple[SequenceUpdate, ...] = ()
    heartbeat: Heartbeat | None = None
