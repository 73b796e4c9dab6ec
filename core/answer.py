"""Pieces of an answer as users receive them. Field names are those on the wire."""

from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar

PIECE_BYTES = 16
"""Size in bytes of a piece without its text and tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities computed from the raw logits at one token position.

    Attributes:
        logprob: Log probability of the chosen token.
        top_ids: Ids of the most likely tokens, the most likely first.
        top_logprobs: Log probabilities of ``top_ids``.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer.

    ``text`` never ends inside a character. ``logprobs`` has one entry per token if the request
    wants log probabilities, otherwise it is empty.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Estimated size on the wire in bytes, with 12 bytes for each log probability."""
        num_logprobs = sum(1 + len(logprobs.top_ids) for logprobs in self.logprobs)
        return PIECE_BYTES + len(self.text) + 4 * len(self.token_ids) + 12 * num_logprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call.

    Attributes:
        prompt: Tokens of the prompt.
        cached: Tokens of the prompt that were found in a prefix cache.
        completion: Tokens that this call returned.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Speculation totals of one sequence.

    For an answer that migrated, the counts are summed over the ranks that generated it. The counts
    of ranks that died are lost.

    Attributes:
        num_drafted: Draft depth, summed over all steps.
        accepted_per_position: Entry i is the number of steps in which draft i + 1 was accepted.
        drafted_per_position: Entry i is the number of steps that had a draft i + 1.
        num_nodes: Number of verified drafts, including all branches of a tree.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    first_step_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    num_nodes: int = 0

    def truncate_last_run(self, before: "SpeculationCounts", num_kept: int) -> "SpeculationCounts":
        """Return the counts as if the last step had emitted only ``num_kept`` tokens.

        Drafts that are cut off no longer count as accepted. ``before`` holds the counts before the
        last step.
        """
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


def _add(value: Any, other: Any) -> Any:
    """Return the sum of two numbers or of two tuples of counts, or the second of two strings."""
    if isinstance(value, int | float):
        return value + other
    if isinstance(value, str):
        return other
    return tuple(a + b for a, b in zip_longest(value, other, fillvalue=0))


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one answer in ms.

    ``transfer`` is the time from the end of prefill to the end of the KV hand-over.
    """

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Totals of the KV hand-overs from prefill to decode.

    Attributes:
        bytes: Bytes transferred, 0 if no transfer was necessary.
        tokens: Tokens handed over.
        backend: Name of the transport.
        seconds: Time during which chunks were in flight, from reading to arrival.
    """

    bytes: int = 0
    tokens: int = 0
    backend: str = ""
    seconds: float = 0.0

    def __add__(self, later: "TransferStats") -> "TransferStats":
        return TransferStats(*map(_add, astuple(self), astuple(later)))


@dataclass(frozen=True, slots=True)
class Finished:
    """The last piece of an answer: finish reason and statistics.

    Every piece has ``text`` and ``token_ids``. Here they are empty.
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
