"""Digests of beginnings of token ids: equal ones mean equal tokens."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence


def prefix_digests(token_ids: Sequence[int], stride: int) -> Iterator[bytes]:
    """Digests of the first ``stride``, ``2 * stride``, ... tokens, as far as they go."""
    digest = hashlib.blake2b(digest_size=16)
    for end in range(stride, len(token_ids) + 1, stride):
        digest.update(array("I", token_ids[end - stride : end]).tobytes())
        yield digest.digest()
