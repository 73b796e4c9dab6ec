"""What a gateway asks of a prefill node. The hand-over's own messages are kv_transfer's.

``cancel`` takes an Identity: drop it in whatever phase it is; one that has not come yet is refused
when it does.
"""

from dataclasses import dataclass

from tandem.core.identity import Identity
from tandem.core.request import Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute ``request``'s prompt and keep it for pulling; if it ``is_suspect``, in steps of its
    own."""

    identity: Identity
    request: Request
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """The first token, how long the prompt waited and was computed, and how many of its tokens
    an earlier prompt had computed already."""

    first_token: int
    num_cached: int
    queue_ms: float
    prefill_ms: float
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (self.first_token,)
