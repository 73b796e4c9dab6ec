"""Descriptions of a server, its model and its ranks, for users."""

from dataclasses import dataclass

from tandem.core.heartbeat import RankLoad

PREFILL, DECODE, COLOCATED = "prefill", "decode", "colocated"
STARTING, SERVING, DRAINING = "STARTING", "SERVING", "DRAINING"
NOT_SERVING, DEGRADED = "NOT_SERVING", "DEGRADED"
"""The states of a server, spelled as on the wire."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of the served model.

    Attributes:
        max_model_len: Maximum number of tokens of prompt and answer together.
        vocab_size: Upper bound (exclusive) of token ids.
        num_draft_tokens: ``speculation.max_depth``, or 0 without a drafter.
        think_token_ids: Tokens that start and end the thinking part of an answer, () if there are
            none.
        has_trees: Whether the drafts of a step form a tree instead of a chain.
        digest: Digest of the checkpoint. Two servers have the same digest only if they have the
            same checkpoint.
    """

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_draft_tokens: int
    has_mtp: bool
    dtype: str
    think_token_ids: tuple[int, ...] = ()
    has_trees: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class RankStatus(RankLoad):
    """State of a rank according to its latest heartbeat.

    For a rank that does not respond, only its name, ``alive`` = False and perhaps ``cause`` are
    known.

    Attributes:
        kind: prefill, decode or colocated.
        max_tokens: Capacity of its cache in tokens.
        balance_ratio: Balance of expert rows over the gang's ranks in (0, 1] (core/eplb.py); 0 for
            gangs of one rank.
        cause: Reason why the rank gets no requests; "" if it gets some or the reason is unknown.
        process_epoch: Epoch in which its process loaded the weights.
    """

    name: str
    kind: str
    epoch: int
    alive: bool = True
    max_tokens: int = 0
    balance_ratio: float = 0.0
    cause: str = ""
    process_epoch: int = 0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """State of a server and its ranks.

    The state is NOT_SERVING if no compatible prefill and decode nodes are left, and DEGRADED if
    some node is not ready. ``num_running`` counts the open streams of this server.
    """

    state: str
    mode: str
    num_running: int
    ranks: tuple[RankStatus, ...] = ()
