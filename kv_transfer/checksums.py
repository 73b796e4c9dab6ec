"""Checksums of KV pages, which detect bits flipped in transfer or memory.

``kv_transfer.checksums`` enables them. A checksum covers one part: the entries of ``size``
consecutive tokens in all layers of a group. To compute it, each word of the part is multiplied by
an odd factor that depends on its position. The checksum is the sum of these products modulo 2^64. A
word has eight bytes, or one if the entry size is no multiple of eight.

An odd factor has an inverse modulo 2^64, so a change of one word always changes the sum. The
factors are pseudo-random, so that equal changes of several words, such as those of a stuck bit, do
not cancel out. They come from the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
"""

import asyncio
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.core.errors import HandoverError
from tandem.kv_transfer.caches import DeviceEvent, PagedCaches, Span
from tandem.kv_transfer.layout import Group
from tandem.kv_transfer.messages import Checksums
from tandem.kv_transfer.offer_book import ComputedTokens

if TYPE_CHECKING:
    from tandem.kv_transfer.pull import PullState

_STRIDE, *_MIX = (
    constant - (1 << 64)
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
PARTS_PER_PASS = 64
"""Maximum number of parts in one pass. Bounds the temporary copies of the entries that are read."""


class PageChecksums:
    """Checksums of a prefill rank's pages.

    The checksum of a full page is cached until the page is freed. A page that stays in the prefix
    cache thus keeps the checksum of its first hand-over.
    """

    def __init__(self, caches: PagedCaches) -> None:
        self._caches = caches
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        """Generation and checksum by group name and page."""

    def of(self, now: ComputedTokens) -> Checksums:
        """Return the checksums of all tokens of ``now``. All calls must be on the same thread."""
        size = self._caches.pool.page_size
        groups = {group.name: self._of(group, now, size) for group in self._caches.layout.groups}
        return Checksums(size, groups)

    def _of(self, group: Group, now: ComputedTokens, size: int) -> tuple[int, ...]:
        num_full, num_left = divmod(now.num_tokens, size)
        owned = {(group.name, page): page for page in now.pages[:num_full]}
        generations = dict(zip(owned, now.generations, strict=False))
        fresh = [key for key in owned if self._known.get(key, (-1, 0))[0] != generations[key]]
        pages = [*(owned[key] for key in fresh), *now.pages[num_full : num_full + 1]]
        span = Span(group=group, pages=pages, lo=0, hi=len(fresh) * size + num_left)
        checksums = compute_checksums(caches=self._caches, span=span, size=size, event=now.event)
        for key, value in zip(fresh, checksums, strict=False):
            self._known[key] = generations[key], value
        return *(self._known[key][1] for key in owned), *checksums[len(fresh) :]


async def verify_checksums(pull: "PullState") -> None:
    """Compare the checksums of the pulled pages with those of the prefill rank.

    Raises HandoverError if they differ.
    """
    endpoint = pull.endpoint
    offer = pull.offer
    reply: Checksums = await pull.link.call(
        method="checksums",
        message=offer.identity,
        reply=Checksums,
        wait_s=endpoint.deadlines.progress_s,
    )
    for group in endpoint.caches.layout.groups:
        span = Span(group=group, pages=pull.pages, lo=0, hi=offer.num_tokens)
        computing = endpoint.copier.submit(
            compute_checksums, endpoint.caches, span, reply.num_tokens
        )
        if await asyncio.wrap_future(computing) != reply.groups[group.name]:
            raise HandoverError(
                f"{offer.identity}: received {group.name} cache differs from the prefill rank's"
            )


def compute_checksums(
    caches: PagedCaches, span: Span, size: int, event: DeviceEvent | None = None
) -> tuple[int, ...]:
    """Checksum every ``size`` consecutive tokens of ``span``, starting at its first token.

    The entries are read once ``event`` has occurred. The checksums are final on return.
    """
    checksums: list[int] = []
    for lo in range(span.lo, span.hi, size * PARTS_PER_PASS):
        with caches.on_copy_stream(event):
            part = span._replace(lo=lo, hi=min(span.hi, lo + size * PARTS_PER_PASS))
            checksums += _checksum_parts(caches, part, size).tolist()
    return tuple(checksums)


def _checksum_parts(caches: PagedCaches, span: Span, size: int) -> Tensor:
    slots_T = caches.slots_T(span)
    first = 0
    num_parts = -(-len(slots_T) // size)
    sum_N = torch.zeros(num_parts, dtype=torch.int64, device=caches.device)
    word = torch.int64 if span.group.bytes_per_token % 8 == 0 else torch.uint8
    for layer in caches.layers(span.group, word):
        words_TW = layer[slots_T].to(torch.int64)
        num_words = size * words_TW.shape[1]
        words_TW = pad(words_TW, (0, 0, 0, num_parts * size - len(words_TW)))
        factor_W = _factors(torch.arange(first, first + num_words, device=caches.device))
        sum_N += (words_TW.view(num_parts, num_words) * factor_W).sum(-1)
        first += num_words
    return sum_N


def _factors(x_W: Tensor) -> Tensor:
    x_W = x_W * _STRIDE
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x_W = (x_W ^ (x_W >> shift)) * factor
    return (x_W ^ (x_W >> 31)) | 1
