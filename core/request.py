"""The nouns that cross nodes, all frozen.

A *request* is what a user sent. A *sequence* is its state on one node, and is a pure
function of (request, output token ids): so ``prompt_ids`` and ``output_ids`` stay apart.
"""

from dataclasses import dataclass, field, replace
from itertools import zip_longest

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
"""The finish reasons, spelled as on the wire."""
PREEMPTED = "preempted"
"""A decode rank gave a sequence up for others; it goes on from what it has emitted. Users never
see this reason."""

STRICT, RELAXED, RELAXED_LOG_PROBS = "strict", "relaxed", "relaxed_log_probs"
REJECTION, REJECTION_GREEDY = "rejection", "rejection_greedy"
"""The kinds of acceptance, spelled as on the wire but for case and prefix."""


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
    answer ends before ``min_tokens``. ``logprobs`` is how many of the likeliest tokens to tell
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

    @property
    def adjusts_logits(self) -> bool:
        """Whether tokens are chosen from anything but the raw logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """``max_drafts`` None means the server's ``speculation.num_tokens``; 0 turns it off.

    ``acceptance`` names the rule that drafts are judged by. The relaxed ones accept, while the
    model thinks, a draft among the ``relaxed_top_n`` likeliest tokens that is at most
    ``relaxed_delta`` less likely than the best.
    """

    max_drafts: int | None = None
    acceptance: str = STRICT
    relaxed_top_n: int = 1
    relaxed_delta: float = 0.0

    @property
    def is_relaxed(self) -> bool:
        return self.acceptance in (RELAXED, RELAXED_LOG_PROBS)


@dataclass(frozen=True, slots=True)
class Request:
    """``output_ids`` are tokens already emitted elsewhere (resume); empty at first."""

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """One sequence's totals; ``accepted_per_position[i]`` counts drafts i+1 accepted,
    ``drafted_per_position[i]`` the steps that had that draft.

    Of an answer that went on elsewhere it is the sum over its lives; a life that ended with its
    node is not in it.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    first_step_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()

    def cut(self, before: "SpeculationCounts", num_kept: int) -> "SpeculationCounts":
        """These counts had the run of the last step (``before``: the counts then) been cut to
        ``num_kept`` tokens: what is cut off does not count as accepted."""
        num_run = self.num_accepted - before.num_accepted
        num_last = min(num_run, num_kept)
        return replace(
            self,
            num_accepted=before.num_accepted + num_last,
            accepted_per_position=tuple(
                num - (num_last <= i < num_run) for i, num in enumerate(self.accepted_per_position)
            ),
            first_step_accepted=num_last if self.num_steps == 1 else self.first_step_accepted,
        )

    def __add__(self, other: "SpeculationCounts") -> "SpeculationCounts":
        return SpeculationCounts(
            num_steps=self.num_steps + other.num_steps,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            accepted_per_position=_add(self.accepted_per_position, other.accepted_per_position),
            first_step_accepted=self.first_step_accepted + other.first_step_accepted,
            drafted_per_position=_add(self.drafted_per_position, other.drafted_per_position),
        )


def _add(ones: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(ones, others, fillvalue=0))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of raw logits: of the token, and of the likeliest, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one step gave one sequence. ``finish_reason`` None while it goes on; ``counts`` come
    with the last update, with each where a stop string may end the answer elsewhere."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    error: str | None = None
    counts: SpeculationCounts | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """Everything one decode rank emitted in one step."""

    epoch: int
    step: int
    num_active_rows: int
    num_free_pages: int
    updates: tuple[SequenceUpdate, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. ``text`` never ends inside a character; ``logprobs`` has an entry
    per token if they were asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds. ``transfer`` is the part still visible after prefill ended."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What crossed from prefill to decode; ``num_bytes`` 0 when nothing had to."""

    num_bytes: int = 0
    num_tokens: int = 0
    backend: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last message of a stream."""

    index: int
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    counts: SpeculationCounts
    timings_ms: Timings
    kv_transfer: TransferStats
    seed: int
    error: str | None = None
