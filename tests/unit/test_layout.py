from dataclasses import replace

import pytest

from tandem.core.control import Empty, Service
from tandem.core.errors import LayoutMismatch, RankLost, StalePages
from tandem.core.schema import WireError, decode, encode_failure, pack, unpack
from tandem.kv_transfer.layout import Group, Layout, check_compatible
from tandem.kv_transfer.messages import PullReply, Seal

LAYOUT = Layout((Group("main", 4, 1152), Group("mtp", 1, 1152)), "bfloat16", "deepseek-v3", 7)


def test_bytes_and_groups() -> None:
    assert sum(group.bytes_per_token_all_layers for group in LAYOUT.groups) == 5 * 1152
    assert LAYOUT.group("mtp") is LAYOUT.groups[1]
    with pytest.raises(LayoutMismatch, match="'eagle'.*main.*mtp"):
        LAYOUT.group("eagle")


def test_equal_layouts_agree_and_survive_the_wire() -> None:
    copy = unpack(Layout, pack(LAYOUT))
    assert copy == LAYOUT and copy.compatibility_facts() == LAYOUT.compatibility_facts()
    check_compatible(LAYOUT.compatibility_facts(), copy.compatibility_facts())


@pytest.mark.parametrize(
    "less",
    [
        replace(LAYOUT, groups=LAYOUT.groups[:1]),
        replace(LAYOUT, num_features=0),
        replace(LAYOUT, groups=LAYOUT.groups[:1], num_features=0),
    ],
)
def test_who_wants_less_can_have_it_and_not_the_other_way(less: Layout) -> None:
    check_compatible(LAYOUT.compatibility_facts(), less.compatibility_facts())
    with pytest.raises(LayoutMismatch, match="decode rank needs (mtp: 1 x 1152 B|features: 7)"):
        check_compatible(less.compatibility_facts(), LAYOUT.compatibility_facts())


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (
            replace(LAYOUT, dtype="float32"),
            "needs dtype: float32; the prefill rank has dtype: bfloat16",
        ),
        (
            replace(LAYOUT, model="other"),
            "needs model: other; the prefill rank has model: deepseek-v3",
        ),
        (replace(LAYOUT, protocol=10), "needs protocol: 10; the prefill rank has protocol: 9"),
        (replace(LAYOUT, num_features=9), "needs features: 9; the prefill rank has features: 7"),
        (
            replace(LAYOUT, computed_by="eagle3 12"),
            "needs drafter: eagle3 12; the prefill rank has nothing else",
        ),
        (
            replace(LAYOUT, groups=(LAYOUT.groups[0], Group("mtp", 2, 1152))),
            "needs mtp: 2 x 1152 B; the prefill rank has mtp: 1 x 1152 B",
        ),
        (
            replace(LAYOUT, groups=(Group("main", 4, 640), LAYOUT.groups[1])),
            "needs main: 4 x 640 B; the prefill rank has main: 4 x 1152 B",
        ),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(theirs: Layout, text: str) -> None:
    with pytest.raises(LayoutMismatch, match=text):
        check_compatible(LAYOUT.compatibility_facts(), theirs.compatibility_facts())


def test_everything_that_differs_is_named() -> None:
    other = Layout((Group("main", 3, 8),), "float32", "x", 0, 1)
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(LAYOUT.compatibility_facts(), other.compatibility_facts())
    assert all(
        name in str(caught.value) for name in ("dtype", "model", "protocol", "main: 3 x 8 B")
    )


def test_a_layout_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct names"):
        Layout((Group("a", 1, 1), Group("a", 1, 1)), "float32", "x")
    with pytest.raises(ValueError, match="needs layers and bytes"):
        Layout((Group("a", 0, 1),), "float32", "x")


def test_errors_survive_the_trip() -> None:
    for error in (StalePages("page 3"), LayoutMismatch("dtype"), RankLost("gone")):
        with pytest.raises(type(error), match=str(error)):
            decode(Empty, encode_failure(error))


def test_replies_are_checked() -> None:
    ready = PullReply(True, 3, Seal(7, b"\0\1", "float32", (1, 1)))
    assert decode(PullReply, pack(ready)) == ready
    with pytest.raises(WireError, match="expected message Empty, got 'PullReply'"):
        decode(Empty, pack(ready))


async def test_another_epoch_is_a_lost_node_with_both_values() -> None:
    async def answer(_: None) -> None:
        return

    service = Service("p0", 7, {"load": (None, answer)})
    assert decode(Empty, await service.handle(7, "load", b"")) == Empty()
    with pytest.raises(RankLost, match="the call is for epoch 6, but this rank is in epoch 7"):
        decode(Empty, await service.handle(6, "load", b""))
