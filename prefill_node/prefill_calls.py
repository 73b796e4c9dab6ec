"""Messages from a gateway to a prefill rank. Hand-over messages are in kv_transfer/messages.py.

The call ``cancel`` takes an Identity and drops the sequence in any phase. If the sequence arrives
only later, it is refused.
"""

from dataclasses import dataclass

from tandem.core.identity import Identity
from tandem.core.request import Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Prefill:
    """Request to compute a prompt and keep its KV cache until a decode rank has pulled it.

    ``is_suspect``: the prompt may have crashed a rank and therefore runs alone in its steps.
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
        queue_ms: Milliseconds from the call until the first chunk started.
        prefill_ms: Milliseconds from the start of the first chunk until the prompt was computed.
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
