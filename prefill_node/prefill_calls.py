"""Messages from a gateway to a prefill rank. Hand-over messages are in kv_transfer/messages.py.

``cancel`` takes an Identity and drops the sequence in any phase. If the sequence arrives later, it
is refused.
"""

from dataclasses import dataclass

from tandem.core.identity import Identity
from tandem.core.request import Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Prefill:
    """Request to compute a prompt and keep its KV cache for pulling.

    A suspect prompt runs alone in its steps.
    """

    identity: Identity
    request: Request
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """Reply to Prefill.

    Attributes:
        first_token: First output token.
        num_cached: Number of prompt tokens found in the prefix cache.
        queue_ms: Milliseconds before the first chunk started.
        prefill_ms: Milliseconds from then until the prompt was computed.
        logprobs: Log probabilities of the first token, if requested.
    """

    first_token: int
    num_cached: int
    queue_ms: float
    prefill_ms: float
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (self.first_token,)
