"""What a server and its ranks tell of themselves."""

from dataclasses import dataclass

from tandem.core.heartbeat import RankLoad

PREFILL, DECODE, COLOCATED = "prefill", "decode", "colocated"
STARTING, SERVING, DRAINING = "STARTING", "SERVING", "DRAINING"
NOT_SERVING, DEGRADED = "NOT_SERVING", "DEGRADED"
"""The states of a server, spelled as on the wire."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """``max_model_len`` bounds prompt and answer together; token ids are below ``vocab_size``.

    ``num_draft_tokens`` is ``speculation.max_depth``, 0 without a drafter. ``think_token_ids``
    begin and end the thinking part of an answer, () if the model has none. ``has_trees``: drafts
    of a step are more than one path. ``digest`` is equal for servers of the same checkpoint only.
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
    """A rank as its latest heartbeat says. Of one that does not answer only ``alive`` False is
    known, and the ``cause`` where the controller has one.

    ``kind`` is prefill, decode or colocated; its cache has room for ``max_tokens``.
    ``balance_ratio`` is how evenly the rows of its gang's experts are spread (core/eplb.py). It was
    ``born`` in the epoch in which its process loaded its weights.
    """

    name: str
    kind: str
    epoch: int
    alive: bool = True
    max_tokens: int = 0
    balance_ratio: float = 0.0
    cause: str = ""
    born: int = 0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """``num_running`` counts the streams open at this server. It is NOT_SERVING while no nodes are
    left that work together, DEGRADED while not all are ready that there should be."""

    state: str
    mode: str
    num_running: int
    ranks: tuple[RankStatus, ...] = ()
