"""What a user is told: the pieces of an answer, with the names of their fields on the wire."""

from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar

PIECE_BYTES = 16
"""Size of a piece without its text and tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of raw logits: of the token, and of the likeliest, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. ``text`` never ends inside a character; ``logprobs`` has an entry
    per token if they were asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size on the wire, estimated: 12 bytes for each log probability."""
        num_logprobs = sum(1 + len(one.top_ids) for one in self.logprobs)
        return PIECE_BYTES + len(self.text) + 4 * len(self.token_ids) + 12 * num_logprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens: of the prompt, those of it found in a cache, and those that this call gave."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """One sequence's totals; ``accepted_per_position[i]`` counts drafts i+1 accepted,
    ``drafted_per_position[i]`` the steps that had that draft. ``num_nodes`` counts all drafts that
    were verified: of a tree more than its depth, which is in ``num_drafted``.

    Of an answer that went on elsewhere it is the sum over its lives; a life that ended with its
    node is not in it.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    first_step_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    num_nodes: int = 0

    def truncate_last_run(self, before: "SpeculationCounts", num_kept: int) -> "SpeculationCounts":
        """These counts had the run of the last step (``before``: the counts then) been cut to
        ``num_kept`` tokens: what is cut off does not count as accepted."""
        num_run = self.num_accepted - before.num_accepted
        num_feature_tokens = min(num_run, num_kept)
        return replace(
            self,
            num_accepted=before.num_accepted + num_feature_tokens,
            accepted_per_position=tuple(
                num - (num_feature_tokens <= i < num_run)
                for i, num in enumerate(self.accepted_per_position)
            ),
            first_step_accepted=num_feature_tokens
            if self.num_steps == 1
            else self.first_step_accepted,
        )

    def __add__(self, other: "SpeculationCounts") -> "SpeculationCounts":
        return SpeculationCounts(*map(_add, astuple(self), astuple(other)))


def _add(one: Any, other: Any) -> Any:
    """The sum of two numbers, or of two lists of counts by position; of two names the latter."""
    if isinstance(one, int | float):
        return one + other
    if isinstance(one, str):
        return other
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


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
    """What crossed from prefill to decode; ``bytes`` 0 when nothing had to. ``seconds`` is the
    time in which chunks of it were on their way, from reading to arrival."""

    bytes: int = 0
    tokens: int = 0
    backend: str = ""
    seconds: float = 0.0

    def __add__(self, later: "TransferStats") -> "TransferStats":
        return TransferStats(*map(_add, astuple(self), astuple(later)))


@dataclass(frozen=True, slots=True)
class Finished:
    """The last piece of an answer: how it ended, and what it took.

    It has the text and tokens of an empty ``Delta``, so that a loop may read those of every piece.
    """

    index: int
    finish_reason: str
    usage: Usage
    speculation: SpeculationCounts
    timings_ms: Timings
    kv_transfer: TransferStats
    seed: int
    error: str | None = None

    text: ClassVar[str] = ""
    token_ids: ClassVar[tuple[int, ...]] = ()
    num_bytes: ClassVar[int] = PIECE_BYTES


Piece = Delta | Finished
