from dataclasses import replace

import pytest

from core.control import Done, Service
from core.errors import LayoutMismatch, RankLost, StalePages
from core.schema import WireError, decode, encode_failure, pack, unpack
from kv_transfer.layout import Group, Layout, check_same
from kv_transfer.messages import Ready, Seal

LAYOUT = Layout((Group("main", 4, 1152), Group("mtp", 1, 1152)), "bfloat16", "deepseek-v3")


def test_bytes_and_groups() -> None:
    assert sum(group.bytes_per_token_all_layers for group in LAYOUT.groups) == 5 * 1152
    assert LAYOUT.group("mtp") is LAYOUT.groups[1]
    with pytest.raises(LayoutMismatch, match="'eagle'.*main.*mtp"):
        LAYOUT.group("eagle")


def test_equal_layouts_agree_and_survive_the_wire() -> None:
    copy = unpack(Layout, pack(LAYOUT))
    assert copy == LAYOUT and copy.fingerprint() == LAYOUT.fingerprint()
    check_same(LAYOUT, copy)
    assert LAYOUT.fingerprint() == "7558df03a71d1122", "the fingerprint differs between versions"


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (replace(LAYOUT, dtype="float32"), "dtype: 'bfloat16' here, 'float32' there"),
        (replace(LAYOUT, model="other"), "model: 'deepseek-v3' here, 'other' there"),
        (replace(LAYOUT, protocol=7), "protocol: 5 here, 7 there"),
        (replace(LAYOUT, groups=LAYOUT.groups[:1]), r"groups: \['main', 'mtp'\] here, \['main'\]"),
        (
            replace(LAYOUT, groups=(LAYOUT.groups[0], Group("mtp", 2, 1152))),
            "groups.mtp.num_layers: 1 here, 2 there",
        ),
        (
            replace(LAYOUT, groups=(Group("main", 4, 640), LAYOUT.groups[1])),
            "groups.main.bytes_per_token: 1152 here, 640 there",
        ),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(theirs: Layout, text: str) -> None:
    assert theirs.fingerprint() != LAYOUT.fingerprint()
    with pytest.raises(LayoutMismatch, match=text):
        check_same(LAYOUT, theirs)


def test_every_differing_field_is_named() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        check_same(LAYOUT, Layout((Group("main", 3, 8),), "float32", "x", 1))
    assert all(name in str(caught.value) for name in ("dtype", "model", "protocol", "groups"))


def test_a_layout_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct names"):
        Layout((Group("a", 1, 1), Group("a", 1, 1)), "float32", "x")
    with pytest.raises(ValueError, match="needs layers and bytes"):
        Layout((Group("a", 0, 1),), "float32", "x")


def test_errors_survive_the_trip() -> None:
    for error in (StalePages("page 3"), LayoutMismatch("dtype"), RankLost("gone")):
        with pytest.raises(type(error), match=str(error)):
            decode(Done, encode_failure(error))


def test_replies_are_checked() -> None:
    ready = Ready(True, 3, Seal(7, b"\0\1", "float32", (1, 1)))
    assert decode(Ready, pack(ready)) == ready
    with pytest.raises(WireError, match="expected message Done, got 'Ready'"):
        decode(Done, pack(ready))


async def test_another_epoch_is_a_lost_node_with_both_values() -> None:
    async def answer(_: None) -> None:
        return

    service = Service("p0", 7, {"load": (None, answer)})
    assert decode(Done, await service.handle(7, "load", b"")) == Done()
    with pytest.raises(RankLost, match="epoch 6 was asked for, this is 7"):
        decode(Done, await service.handle(6, "load", b""))
