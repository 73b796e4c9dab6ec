"""Which prefill rank and which decode rank serve a request: a pure choice over loads, of those that
fit."""

from collections.abc import Mapping, Sequence

from tandem.cluster.gateway.handles import Handle
from tandem.core.errors import LayoutMismatch, RankLost
from tandem.kv_transfer.layout import check_given

Ranks = tuple[Handle, Handle]
"""Where a prompt is computed, and where its answer is written."""


def choose_route(
    pairs: Sequence[Ranks], num_tokens: int, known: Mapping[str, int], causes: Sequence[str] = ()
) -> Ranks:
    """For a text of ``num_tokens``, of which the ranks ``known`` by their lives have computed so
    many before: the pair whose decode rank has the fewest sequences, and room for this one, and
    whose prefill rank has the fewest tokens to compute until this text is done.

    So a known beginning attracts for as long as it saves more than it makes wait: neither the
    first rank that knows what all prompts begin with nor an idle cluster piles up on one rank.
    Among equals the prefill rank that got least, and the decode rank of most room.

    Raises RankLost when there is no pair, with the ``causes`` why gangs are not ready.
    """
    if not pairs:
        none = "no prefill and decode rank are left that work together and cache alike"
        raise RankLost("; ".join((none, *causes)))

    def cost(pair: Ranks) -> tuple[bool, int, int, int, int, str]:
        p, d = pair
        is_full = d.load.num_free_tokens < num_tokens
        rows = len(d.inboxes.queues) + d.load.num_other_rows
        waits = p.load.num_tokens + p.load.num_other_tokens
        waits -= min(known.get(p.life, 0), num_tokens)
        return is_full, rows, waits, p.load.num_sent, -d.load.num_free_tokens, d.life

    return min(pairs, key=cost)


def check_fit(prefill: Handle, decode: Handle) -> None:
    """Raises ValueError with both names if one does not have what the other's drafter reads."""
    try:
        check_given(prefill.info.caches, decode.info.caches)
    except LayoutMismatch as error:
        names = (f"{one.life} (drafter {one.info.drafter})" for one in (prefill, decode))
        raise ValueError(f"{', '.join(names)}: {error}") from error
