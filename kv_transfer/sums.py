"""Sums of what pages hold, by which a flipped bit is found on its whole way, in memory too
(``kv_transfer.checksums``).

The words (of eight bytes, or of one where eight do not fit) of a part of the tokens in all layers
of a group, each times an odd number of its own, modulo 2^64: an odd factor has an inverse, so no
change of one word leaves the sum as it was. The factors are as good as random (SplitMix64's
finalizer, Steele et al., OOPSLA 2014), so that changes which are alike, as of a bit that is stuck,
do not cancel.
"""

import asyncio
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.core.errors import HandoverError
from tandem.kv_transfer.caches import Mark, PagedCaches, Span
from tandem.kv_transfer.layout import Group
from tandem.kv_transfer.messages import Sums
from tandem.kv_transfer.offered import Computed

if TYPE_CHECKING:
    from tandem.kv_transfer.pull import Pulling

_STRIDE, *_MIX = (
    one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
NUM_AT_ONCE = 64
"""Parts: what is read is copied first."""


class PageSums:
    """Of a prefill rank's pages. Those of full pages are kept as long as the page is whose it was:
    what lies in the prefix cache has the sum of its first hand-over."""

    def __init__(self, caches: PagedCaches) -> None:
        self._caches = caches
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        """By group and page: its generation and sum."""

    def of(self, now: Computed) -> Sums:
        """Of all that is computed. On one thread."""
        size = self._caches.pool.page_size
        groups = {group.name: self._of(group, now, size) for group in self._caches.layout.groups}
        return Sums(size, groups)

    def _of(self, group: Group, now: Computed, size: int) -> tuple[int, ...]:
        num_full, num_left = divmod(now.num_tokens, size)
        owned = {(group.name, page): page for page in now.pages[:num_full]}
        generations = dict(zip(owned, now.generations, strict=False))
        fresh = [key for key in owned if self._known.get(key, (-1, 0))[0] != generations[key]]
        pages = [*(owned[key] for key in fresh), *now.pages[num_full : num_full + 1]]
        span = Span(group, pages, 0, len(fresh) * size + num_left)
        sums = sums_of(self._caches, span, size, now.mark)
        for key, value in zip(fresh, sums, strict=False):
            self._known[key] = generations[key], value
        return *(self._known[key][1] for key in owned), *sums[len(fresh) :]


async def check_sums(pull: "Pulling") -> None:
    """Compare what is in the pages now, whatever way it came, with what prefill has. Raises
    HandoverError where that differs."""
    side, offer = pull.side, pull.offer
    told: Sums = await pull.link.call("sums", offer.identity, Sums, side.deadlines.progress_s)
    for group in side.caches.layout.groups:
        span = Span(group, pull.pages, 0, offer.num_tokens)
        summing = side.copier.submit(sums_of, side.caches, span, told.num_tokens)
        if await asyncio.wrap_future(summing) != told.groups[group.name]:
            raise HandoverError(f"{offer.identity}: other bits than prefill has, in {group.name}")


def sums_of(
    caches: PagedCaches, span: Span, size: int, mark: Mark | None = None
) -> tuple[int, ...]:
    """Of each ``size`` of its tokens, from its first one on; done when it returns."""
    sums: list[int] = []
    for lo in range(span.lo, span.hi, size * NUM_AT_ONCE):
        with caches.beside(mark):
            part = span._replace(lo=lo, hi=min(span.hi, lo + size * NUM_AT_ONCE))
            sums += _summed(caches, part, size).tolist()
    return tuple(sums)


def _summed(caches: PagedCaches, span: Span, size: int) -> Tensor:
    slots_T, first = caches.slots_T(span), 0
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
