"""Routing is a pure choice: capacity first, then known beginnings, then load."""

import pytest

from cluster.gateway.affinity import STRIDE, PrefixAffinity
from cluster.gateway.router import MAX_PREFERRED_LEAD, DecodeLoad, PrefillLoad, Route, choose_route
from core.errors import NodeLost, Overloaded


def prefill(name: str, num_tokens: int = 0, layout: str = "x", num_sent: int = 0) -> PrefillLoad:
    return PrefillLoad(name, num_tokens, layout, num_sent)


def decode(name: str, num_rows: int = 0, layout: str = "x") -> DecodeLoad:
    return DecodeLoad(name, num_rows, 4, layout)


def test_the_least_loaded_pair() -> None:
    prefills = [prefill("p0", 500), prefill("p1", 20)]
    decodes = [decode("d0", 3), decode("d1", 1)]
    assert choose_route(prefills, decodes) == Route("p1", "d1")
    assert choose_route(prefills, decodes, {"p1", "d1"}) == Route("p0", "d0")


def test_among_equals_the_one_that_got_least() -> None:
    prefills = [prefill("p0", num_sent=7), prefill("p1", num_sent=6)]
    assert choose_route(prefills, [decode("d")]).prefill == "p1"


def test_a_known_beginning_attracts_while_load_allows() -> None:
    decodes = [decode("d")]
    for lead, expected in ((MAX_PREFERRED_LEAD, "p1"), (MAX_PREFERRED_LEAD + 1, "p0")):
        prefills = [prefill("p0"), prefill("p1", lead)]
        assert choose_route(prefills, decodes, preferred="p1").prefill == expected
    prefills = [prefill("p0"), prefill("p1")]
    assert choose_route(prefills, decodes, {"p1"}, preferred="p1").prefill == "p0"


def test_only_pairs_that_cache_alike() -> None:
    prefills = [prefill("p0", layout="y"), prefill("p1", 900, layout="x")]
    assert choose_route(prefills, [decode("d", 3)]) == Route("p1", "d")
    with pytest.raises(NodeLost, match=r"p0.*y"):
        choose_route(prefills[:1], [decode("d")])


def test_full_rows_are_overload() -> None:
    with pytest.raises(Overloaded):
        choose_route([prefill("p")], [decode("d0", 4), decode("d1", 4)])


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
