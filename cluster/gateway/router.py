"""Which prefill rank and which decode rank serve a request: a pure choice over loads, of those that
fit."""

from collections.abc import Mapping, Sequence

from tandem.cluster.gateway.handles import RankHandle
from tandem.core.errors import LayoutMismatch, RankLost
from tandem.kv_transfer.layout import check_compatible

RankPair = tuple[RankHandle, RankHandle]
"""Where a prompt is computed, and where its answer is written."""


def choose_route(
    pairs: Sequence[RankPair],
    num_tokens: int,
    num_cached: Mapping[str, int],
    causes: Sequence[str] = (),
) -> RankPair:
    """For a text of ``num_tokens``, of which the ranks ``num_cached`` by their lives have computed
    so many before: the pair whose decode rank has the fewest sequences, and room for this one, and
    whose prefill rank has the fewest tokens to compute until this text is done.

    So a known beginning attracts for as long as it saves more than it makes wait: neither the
    first rank that knows what all prompts begin with nor an idle cluster piles up on one rank.
    Among equals the prefill rank that got least, and the decode rank of most room.

    Raises RankLost when there is no pair, with the ``causes`` why gangs are not ready.
    """
    if not pairs:
        none = "no prefill and decode rank are left that work together and cache alike"
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
    """Raises ValueError with both names if one does not have what the other's drafter reads."""
    try:
        check_compatible(prefill.info.caches, decode.info.caches)
    except LayoutMismatch as error:
        names = (f"{one.epoch_name} (drafter {one.info.drafter})" for one in (prefill, decode))
        raise ValueError(f"{', '.join(names)}: {error}") from error
