"""Identity of one attempt at one answer, the same on every rank."""

import secrets
from dataclasses import dataclass, field

_NONCE_BITS = 53


def new_nonce() -> int:
    """Return a random number that is practically unique. Nonces are compared for equality only."""
    return secrets.randbits(_NONCE_BITS)


@dataclass(frozen=True, slots=True)
class Identity:
    """One attempt at one answer of a request.

    Late messages of an earlier attempt, or of a request with the same id at another gateway, match
    no attempt and are ignored.

    Attributes:
        request_id: Unique at its gateway.
        answer: Index of the answer among the request's n answers.
        attempt: Nonce of this attempt.
    """

    request_id: str
    answer: int = 0
    attempt: int = field(default_factory=new_nonce)

    def __str__(self) -> str:
        which = f"[{self.answer}]" if self.answer else ""
        return f"{self.request_id}{which} (attempt {self.attempt:x})"
