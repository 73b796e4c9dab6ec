"""Messages survive encoding and decoding. A message that does not match its schema is rejected by
name."""

import tracemalloc
from dataclasses import dataclass

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import Overloaded, RankLost
from tandem.core.heartbeat import Heartbeat, RankLoad
from tandem.core.identity import Identity
from tandem.core.progress import EngineProgress
from tandem.core.request import Request, SamplingParams, SequenceUpdate, TokenFrame
from tandem.core.schema import Failure, WireError, decode, encode_failure, pack, unpack


@dataclass(frozen=True)
class Sample:
    number: int
    ratio: float
    maybe: str | None
    names: tuple[str, ...]
    table: dict[str, int]
    sampling: SamplingParams


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.none() | st.text(),
    st.lists(st.text()).map(tuple),
    st.dictionaries(st.text(), st.integers(0, 9)),
)
def test_round_trip(number, ratio, maybe, names, table) -> None:
    message = Sample(number, ratio, maybe, names, table, SamplingParams(seed=number))
    assert unpack(Sample, pack(message)) == message


def test_nested_messages_round_trip() -> None:
    request = Request("r", (1, 2, 3), (4,), SamplingParams(temperature=1, seed=2**62))
    assert unpack(Request, pack(request)).sampling.seed == 2**62
    identity = Identity("r", 2)
    beat = Heartbeat(
        EngineProgress(1, 0.5, 10.0),
        RankLoad(num_active_rows=2, counters={"step_s": 0.1}),
        3,
        4,
        (identity,),
    )
    frame = TokenFrame((SequenceUpdate(identity, (5,)),), beat)
    assert unpack(TokenFrame, pack(frame)) == frame


def _plain(*left_out: str, **changes: object) -> bytes:
    body = msgpack.unpackb(pack(Sample(1, 1.0, None, (), {}, SamplingParams())))
    body[1].update(changes)
    for name in left_out:
        del body[1][name]
    return msgpack.packb(body)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1]), "as [name, fields]"),
        (pack(SamplingParams()), "expected message Sample"),
        (_plain(number="1"), "Sample.number: Input should be a valid integer, got str '1'"),
        (_plain(number=True), "Sample.number: Input should be a valid integer, got bool"),
        (_plain("ratio"), "Sample.ratio: Field required"),
        (_plain(extra=1), "Sample.extra: Unexpected keyword argument"),
        (_plain(names=[1]), "Sample.names.0: Input should be a valid string"),
        (_plain(table={"a": "b"}), "Sample.table.a: Input should be a valid integer"),
        (_plain(sampling=[]), "Sample.sampling: "),
    ],
)
def test_mismatches_are_named(data: bytes, expected: str) -> None:
    with pytest.raises(WireError) as error:
        unpack(Sample, data)
    assert expected in str(error.value)


def test_failures_travel_as_messages() -> None:
    with pytest.raises(Overloaded) as overloaded:
        decode(Sample, encode_failure(Overloaded("full", retry_after_s=3.0)))
    assert overloaded.value.retry_after_s == 3.0
    with pytest.raises(RankLost, match="gone"):
        decode(Sample, encode_failure(RankLost("gone")))
    with pytest.raises(ValueError, match="bad"):
        decode(Sample, encode_failure(WireError("bad")))


@pytest.mark.parametrize(
    "body", [[None] * 3_000_000, b"x" * 3_000_000, ["Failure", b"x" * 3_000_000], "x" * 3_000_000]
)
def test_an_error_quotes_little_of_a_large_body(body: object) -> None:
    data = msgpack.packb(body)
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            unpack(Failure, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400
    assert peak < 40_000_000, "a list of nils is 24 MB, its text would be 18 MB more"
