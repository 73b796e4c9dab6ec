"""Who a message is about: one value, the same on every node (design.md, Identity)."""

import secrets
from dataclasses import dataclass, field

_NONCE_BITS = 53


def new_nonce() -> int:
    """A number that is never used again; nothing compares nonces but for equality."""
    return secrets.randbits(_NONCE_BITS)


@dataclass(frozen=True, slots=True)
class Identity:
    """One attempt at one answer of a request.

    ``request_id`` is unique at its gateway, ``answer`` is which of its n answers, ``attempt`` a
    nonce: what is late of an earlier attempt, or of a request of the same id elsewhere, finds
    nothing.
    """

    request_id: str
    answer: int = 0
    attempt: int = field(default_factory=new_nonce)

    def __str__(self) -> str:
        which = f"[{self.answer}]" if self.answer else ""
        return f"{self.request_id}{which} (attempt {self.attempt:x})"
