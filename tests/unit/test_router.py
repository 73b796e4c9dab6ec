"""Routing is a pure choice: load first, then known beginnings, then what each was given."""

from itertools import product

import pytest

from cluster.gateway.affinity import STRIDE, PrefixAffinity
from cluster.gateway.router import MAX_PREFERRED_LEAD, DecodeLoad, PrefillLoad, choose_route
from core.errors import NodeLost


def prefill(name: str, num_tokens: int = 0, num_sent: int = 0) -> PrefillLoad:
    return PrefillLoad(name, num_tokens, num_sent)


def route(
    prefills: list[PrefillLoad], decodes: list[DecodeLoad], preferred: str | None = None
) -> tuple[str, str]:
    return choose_route(list(product(prefills, decodes)), preferred)


def test_the_least_loaded_pair() -> None:
    prefills = [prefill("p0", 500), prefill("p1", 20)]
    decodes = [DecodeLoad("d0", 3), DecodeLoad("d1", 1)]
    assert route(prefills, decodes) == ("p1", "d1")
    assert route(prefills[:1], decodes[:1]) == ("p0", "d0")


def test_among_equals_the_one_that_got_least() -> None:
    prefills = [prefill("p0", num_sent=7), prefill("p1", num_sent=6)]
    assert route(prefills, [DecodeLoad("d", 0)]) == ("p1", "d")


def test_a_known_beginning_attracts_while_load_allows() -> None:
    decodes = [DecodeLoad("d", 0)]
    for lead, expected in ((MAX_PREFERRED_LEAD, "p1"), (MAX_PREFERRED_LEAD + 1, "p0")):
        prefills = [prefill("p0"), prefill("p1", lead)]
        assert route(prefills, decodes, preferred="p1") == (expected, "d")
    assert route([prefill("p0")], decodes, preferred="p1") == ("p0", "d")


def test_only_pairs_that_work_together() -> None:
    pairs = [(prefill("p0", 900), DecodeLoad("d1", 3)), (prefill("p1"), DecodeLoad("d0", 4))]
    assert choose_route(pairs) == ("p0", "d1")
    with pytest.raises(NodeLost, match="cache alike"):
        choose_route([])


def test_affinity_remembers_the_longest_beginning() -> None:
    affinity = PrefixAffinity(max_keys=4)
    long = list(range(3 * STRIDE + 5))
    affinity.remember(long, "p0")
    assert affinity.find(long) == affinity.find(long[: 2 * STRIDE]) == "p0"
    assert affinity.find(long[: STRIDE - 1]) is affinity.find([9] * 300) is None
    affinity.remember([*long[:STRIDE], *[7] * STRIDE], "p1")
    assert affinity.find([*long[:STRIDE], *[7] * STRIDE]) == "p1"
    affinity.remember([8] * 4 * STRIDE, "p2")
    assert affinity.find(long) is None, "memory is bounded"
