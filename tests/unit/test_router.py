"""Routing is a pure function: it compares load first, then known prefixes, then what each rank was
given."""

from itertools import product

import pytest

from tandem.cluster.gateway.affinity import STRIDE, PrefixAffinity
from tandem.cluster.gateway.handles import RankHandle
from tandem.cluster.gateway.router import choose_route
from tandem.core.errors import RankLost
from tandem.core.identity import Identity
from tandem.core.info import ModelInfo
from tandem.core.membership import RankInfo, RankSpec
from tandem.core.tasks import Tasks

MODEL = ModelInfo("tiny", "deepseek_v3", 9, 9, (1,), 3, True, "float32")


class NoControl:
    async def call(self, method: str, payload: bytes) -> bytes:
        raise AssertionError("a choice calls nobody")


def rank(gang: str, **load: int) -> RankHandle:
    info = RankInfo(RankSpec(gang, "any", 1), ("f",), "none", MODEL, 792, 9)
    found = RankHandle(info, NoControl(), Tasks())
    for name, num in load.items():
        setattr(found.load, name, num)
    return found


def prefill(gang: str, num_tokens: int = 0, num_sent: int = 0) -> RankHandle:
    return rank(gang, num_tokens=num_tokens, num_sent=num_sent)


def decode(gang: str, num_rows: int) -> RankHandle:
    """Return a decode rank that runs ``num_rows`` sequences, at most one of them from this
    gateway."""
    found = rank(gang, num_other_rows=max(0, num_rows - 1))
    if num_rows:
        found.inboxes.open(Identity("r"))
    return found


def chosen(
    pairs: list[tuple[RankHandle, RankHandle]],
    known: dict[str, int] | None = None,
    num_tokens: int = 300,
) -> tuple[str, str]:
    p, d = choose_route(pairs, num_tokens, known or {})
    return p.info.spec.gang, d.info.spec.gang


def route(
    prefills: list[RankHandle],
    decodes: list[RankHandle],
    known: dict[str, int] | None = None,
    num_tokens: int = 300,
) -> tuple[str, str]:
    return chosen(list(product(prefills, decodes)), known, num_tokens)


def test_the_least_loaded_pair() -> None:
    prefills = [prefill("p0", 500), prefill("p1", 20)]
    decodes = [decode("d0", 3), decode("d1", 1)]
    assert route(prefills, decodes) == ("p1", "d1")
    assert route(prefills[:1], decodes[:1]) == ("p0", "d0")


def test_among_equals_the_one_that_got_least() -> None:
    prefills = [prefill("p0", num_sent=7), prefill("p1", num_sent=6)]
    assert route(prefills, [decode("d", 0)]) == ("p1", "d")


def test_a_known_beginning_attracts_while_it_saves_more_than_it_makes_wait() -> None:
    decodes, known = [decode("d", 0)], {prefill("p1").epoch_name: 256}
    for lead, expected in ((255, "p1"), (257, "p0")):
        prefills = [prefill("p0"), prefill("p1", lead)]
        assert route(prefills, decodes, known) == (expected, "d")
    assert route([prefill("p0"), prefill("p1", 101)], decodes, known, num_tokens=100) == ("p0", "d")
    assert route([prefill("p0")], decodes, known) == ("p0", "d")


def test_other_gateways_count() -> None:
    busy = rank("p0", num_other_tokens=90)
    assert route([busy, prefill("p1", 60)], [decode("d", 0)]) == ("p1", "d")


def test_a_cold_start_with_one_beginning_for_all_uses_all_ranks() -> None:
    """64 prompts arrive at once. All share their first 512 tokens, followed by 64 different
    ones."""
    affinity, prefills = PrefixAffinity(), [prefill(f"p{i}") for i in range(4)]
    for i in range(64):
        ids = [*range(512), *[1000 + i] * 64]
        pairs = [(p, decode("d", 0)) for p in prefills]
        p, _ = choose_route(pairs, len(ids), affinity.find(ids))
        affinity.remember(ids, p.epoch_name)
        p.load.track_prompt(len(ids))
    sent = [p.load.num_sent for p in prefills]
    assert min(sent) >= 14, f"requests by rank: {sent}"


def test_a_decode_rank_without_room_for_it_is_the_last_choice() -> None:
    full, free = decode("d0", 0), decode("d1", 5)
    full.load.num_free_tokens = 240
    assert route([prefill("p")], [full, free], num_tokens=240) == ("p", "d0")
    assert route([prefill("p")], [full, free], num_tokens=241) == ("p", "d1")
    assert route([prefill("p")], [full], num_tokens=241) == ("p", "d0")
    full.load.num_free_tokens, free = 720, decode("d1", 0)
    assert route([prefill("p")], [full, free]) == ("p", "d1"), "among equals, most room"


def test_only_pairs_that_work_together() -> None:
    pairs = [(prefill("p0", 900), decode("d1", 3)), (prefill("p1"), decode("d0", 4))]
    assert chosen(pairs) == ("p0", "d1")
    with pytest.raises(
        RankLost,
        match="no compatible pair .* is available; p0: down; p1: it waits$",
    ):
        choose_route([], 1, {}, causes=["p0: down", "p1: it waits"])


def test_affinity_remembers_the_longest_beginning() -> None:
    affinity = PrefixAffinity(max_keys=4)
    long = list(range(3 * STRIDE + 5))
    affinity.remember(long, "p0")
    assert affinity.find(long) == {"p0": 3 * STRIDE}
    assert affinity.find(long[: 2 * STRIDE]) == {"p0": 2 * STRIDE}
    assert affinity.find(long[: STRIDE - 1]) == affinity.find([9] * 300) == {}
    affinity.remember([*long[:STRIDE], *[7] * STRIDE], "p1")
    both = {"p0": STRIDE, "p1": 2 * STRIDE}
    assert affinity.find([*long[:STRIDE], *[7] * STRIDE]) == both
    affinity.remember([8] * 4 * STRIDE, "p2")
    assert affinity.find(long) == {}, "memory is bounded"
