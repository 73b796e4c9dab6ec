"""Output of `tandem status` on a terminal of 80 columns."""

from dataclasses import replace

import pytest

from tandem.cluster.commands.status import _show
from tandem.core.info import DEGRADED, SERVING, ModelInfo, RankStatus, ServerStatus

MODEL = ModelInfo("DeepSeek-V3-0324", "deepseek_v3", 163840, 129280, (1,), 3, True, "bfloat16")
EAGER = "native, eager: ranks exchange tokens"
CAUSE = (
    "starting; decode-1.0: loading weights, 40%; "
    "last epoch ended: decode-1.1795433213.0: the actor died"
)


def node(name: str, kernels: str, balance_ratio: float = 0.0) -> RankStatus:
    """Return a rank's status with figures as wide as on a large machine."""
    kind = name.partition("-")[0]
    return RankStatus(
        name, kind, 1795433213, True, 7654322, kernels=kernels, balance_ratio=balance_ratio,
        num_active_rows=16, num_free_tokens=7654321, num_open_leases=12, num_channels=64,
        counters={"num_steps": 1234567},
    )  # fmt: skip


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    def show(state: str, *nodes: RankStatus) -> list[str]:
        monkeypatch.setenv("COLUMNS", "80")
        _show("127.0.0.1:50051", ServerStatus(state, "disaggregated", 3, nodes), MODEL)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        return lines

    return show


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_is_a_line(shown: object, num_ranks: int) -> None:
    seats = [""] if num_ranks == 1 else [".0", ".1"]
    ratio = 0.87 if num_ranks > 1 else 0.0
    nodes = [
        node(f"{kind}-0{seat}", EAGER, ratio) for kind in ("decode", "prefill") for seat in seats
    ]
    lines = shown(SERVING, *nodes)  # type: ignore[operator]
    table = [line for line in lines if "1795433213" in line]
    assert len(table) == 2 * num_ranks and all("7654321/7654322" in line for line in table)
    assert [line.split()[0].partition("-")[0] for line in table[:num_ranks]] == [
        "prefill"
    ] * num_ranks, "prefill comes first"
    assert EAGER in " ".join(map(str.strip, lines)) and len(lines) <= 8 + 2 * num_ranks


def test_who_is_not_ready_stands_apart_with_its_cause(shown: object) -> None:
    lost = RankStatus("decode-1", "decode", 7, alive=False, cause=CAUSE)
    nodes = (node("prefill-0", "native"), node("decode-0", "native, recorded"), lost)
    text = " ".join(line.strip() for line in shown(DEGRADED, *nodes))  # type: ignore[operator]
    assert "DEGRADED" in text and f"decode-1: {CAUSE}" in text


def test_who_has_kept_its_weights_is_told(shown: object) -> None:
    kept = replace(node("decode-0.0", EAGER, 0.9), process_epoch=1795433100)
    new = replace(node("decode-0.1", EAGER, 0.9), process_epoch=1795433213)
    lines = shown(SERVING, kept, new)  # type: ignore[operator]
    assert "decode-0.0: weights kept from an earlier epoch" in lines
