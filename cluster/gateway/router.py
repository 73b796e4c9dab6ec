"""Routing: choose the prefill and decode rank of a request, as a pure function of loads."""

from collections.abc import Mapping, Sequence

from tandem.cluster.gateway.handles import RankHandle
from tandem.core.errors import LayoutMismatch, RankLost
from tandem.kv_transfer.layout import check_compatible

RankPair = tuple[RankHandle, RankHandle]
"""The prefill rank and the decode rank of a request."""


def choose_route(
    pairs: Sequence[RankPair],
    num_tokens: int,
    num_cached: Mapping[str, int],
    causes: Sequence[str] = (),
) -> RankPair:
    """Choose the pair of ranks for a request.

    Pairs are compared by their decode rank first: it should have enough free cache and then the
    fewest sequences. Next, the prefill rank should have the fewest tokens to compute before this
    prompt is done. A cached prefix therefore attracts requests only while it saves more work than
    the queue costs. Ties go to the prefill rank that was sent the fewest prompts, then to the
    decode rank with the most free cache.

    Args:
        pairs: Usable pairs.
        num_tokens: Number of tokens of the prompt.
        num_cached: Tokens of the prompt that each prefill rank has probably cached, by epoch name.
        causes: Reasons why gangs are not ready, for the error message.

    Raises:
        RankLost: There are no pairs.
    """
    if not pairs:
        none = "no compatible pair of prefill and decode ranks is available"
        raise RankLost("; ".join((none, *causes)))

    def cost(pair: RankPair) -> tuple[bool, int, int, int, int, str]:
        p, d = pair
        is_full = d.load.num_free_tokens < num_tokens
        rows = len(d.inboxes.queues) + d.load.num_other_rows
        waits = p.load.num_tokens + p.load.num_other_tokens
        waits -= min(num_cached.get(p.epoch_name, 0), num_tokens)
        return is_full, rows, waits, p.load.num_sent, -d.load.num_free_tokens, d.epoch_name

    return min(pairs, key=cost)


def check_fit(prefill: RankHandle, decode: RankHandle) -> None:
    """Raise ValueError if the caches of two ranks, including those of drafters, do not match."""
    try:
        check_compatible(prefill.info.caches, decode.info.caches)
    except LayoutMismatch as error:
        names = (f"{rank.epoch_name} (drafter {rank.info.drafter})" for rank in (prefill, decode))
        raise ValueError(f"{', '.join(names)}: {error}") from error
