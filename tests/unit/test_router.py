"""Routing is a pure choice: load first, then known beginnings, then what each was given."""

from itertools import product

import pytest

from cluster.gateway.affinity import STRIDE, PrefixAffinity
from cluster.gateway.handles import Handle
from cluster.gateway.router import MAX_PREFERRED_LEAD, choose_route
from core.errors import NodeLost
from core.identity import Identity
from core.info import ModelInfo
from core.membership import NodeInfo, RankSpec

MODEL = ModelInfo("tiny", "deepseek_v3", 9, 9, (1,), 3, True, "float32")


class NoControl:
    async def call(self, method: str, payload: bytes) -> bytes:
        raise AssertionError("a choice calls nobody")


def rank(gang: str, **load: int) -> Handle:
    info = NodeInfo(RankSpec(gang, "any", 1), "f", MODEL, 1, 9, 9, 9)
    return Handle(info, NoControl(), **load)  # type: ignore[arg-type]


def prefill(gang: str, num_tokens: int = 0, num_sent: int = 0) -> Handle:
    return rank(gang, num_tokens=num_tokens, num_sent=num_sent)


def decode(gang: str, num_rows: int) -> Handle:
    """It runs one sequence of ours, if any, and those of others."""
    found = rank(gang, num_others=max(0, num_rows - 1))
    if num_rows:
        found.open_inbox(Identity("r"))
    return found


def chosen(pairs: list[tuple[Handle, Handle]], preferred: str | None = None) -> tuple[str, str]:
    p, d = choose_route(pairs, preferred)
    return p.info.spec.gang, d.info.spec.gang


def route(
    prefills: list[Handle], decodes: list[Handle], preferred: str | None = None
) -> tuple[str, str]:
    return chosen(list(product(prefills, decodes)), preferred)


def test_the_least_loaded_pair() -> None:
    prefills = [prefill("p0", 500), prefill("p1", 20)]
    decodes = [decode("d0", 3), decode("d1", 1)]
    assert route(prefills, decodes) == ("p1", "d1")
    assert route(prefills[:1], decodes[:1]) == ("p0", "d0")


def test_among_equals_the_one_that_got_least() -> None:
    prefills = [prefill("p0", num_sent=7), prefill("p1", num_sent=6)]
    assert route(prefills, [decode("d", 0)]) == ("p1", "d")


def test_a_known_beginning_attracts_while_load_allows() -> None:
    decodes = [decode("d", 0)]
    for lead, expected in ((MAX_PREFERRED_LEAD, "p1"), (MAX_PREFERRED_LEAD + 1, "p0")):
        prefills = [prefill("p0"), prefill("p1", lead)]
        assert route(prefills, decodes, preferred=prefill("p1").name) == (expected, "d")
    assert route([prefill("p0")], decodes, preferred=prefill("p1").name) == ("p0", "d")


def test_only_pairs_that_work_together() -> None:
    pairs = [(prefill("p0", 900), decode("d1", 3)), (prefill("p1"), decode("d0", 4))]
    assert chosen(pairs) == ("p0", "d1")
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
