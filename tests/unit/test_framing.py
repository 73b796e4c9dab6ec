"""Frames are parsed correctly however bytes arrive; a connection without a valid handshake times
out."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.net import framing
from tandem.net.framing import (
    MAX_PENDING_HANDSHAKES,
    FrameDecoder,
    PendingHandshakes,
    encode_frame,
    iter_frames,
)


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 9), min_size=1))
def test_frames_are_what_was_sent_however_it_arrives(sent: list[bytes], cuts: list[int]) -> None:
    decoder, data, got = FrameDecoder(40), b"".join(map(encode_frame, sent)), list[bytes]()
    for cut in itertools.cycle(cuts):
        got += decoder.feed(data[:cut])
        data = data[cut:]
        if not data:
            break
    assert got == sent


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12))
def test_who_reads_what_is_wanted_reads_nothing_of_the_next_frame(sent: list[bytes]) -> None:
    decoder, data = FrameDecoder(40), b"".join(map(encode_frame, sent))
    for frame in sent:
        got: list[bytes] = []
        while not got:
            num = decoder.num_bytes_needed
            got += decoder.feed(data[:num])
            data = data[num:]
        assert got == [frame]
    assert not data


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone() -> None:
    assert list(FrameDecoder(4).feed(encode_frame(b"four"))) == [b"four"]
    frames = FrameDecoder(4).feed(encode_frame(b"four") + encode_frame(b"fives")[:4])
    assert next(frames) == b"four"
    with pytest.raises(ValueError, match="a frame has 5 bytes, at most 4 are allowed"):
        next(frames)
    for length in (b"\xff\xff\xff\xff", b"\x80\x00\x00\x00"):
        with pytest.raises(ValueError):
            list(FrameDecoder(1 << 30).feed(length))


async def test_what_is_received_ends_with_the_connection_also_within_a_frame() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(encode_frame(b"whole") + encode_frame(b"")[:-1])
    reader.feed_eof()
    assert [frame async for frame in iter_frames(reader, 5)] == [b"whole"]
    reader = asyncio.StreamReader()
    reader.feed_data(encode_frame(b"longer"))
    with pytest.raises(ValueError):
        await anext(iter_frames(reader, 5))


class Gate:
    """Handshakes of connections by name, and the connections that were turned away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        self.away: list[str] = []
        self.handshakes = PendingHandshakes[str](2, self.away.append)
        monkeypatch.setattr(framing.time, "monotonic", lambda: self.now)

    def greet(self, name: str, greeting: bytes) -> bytes | None:
        self.handshakes.add(name)
        return self.handshakes.feed(name, encode_frame(greeting))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_who_knows_the_token_is_no_stranger_any_more(gate: Gate) -> None:
    handshakes = gate.handshakes
    handshakes.add("a")
    greeting = encode_frame(handshakes.token + b"me")
    for i in range(len(greeting) - 1):
        assert handshakes.feed("a", greeting[i : i + 1]) is None
    assert len(handshakes._waiting) == 1 and handshakes.num_bytes_needed("a") == 1
    assert handshakes.feed("a", greeting[-1:]) == b"me"
    gate.now += 1000
    handshakes.sweep()
    assert not len(handshakes._waiting) and not gate.away


def test_each_gate_has_a_token_of_its_own(gate: Gate) -> None:
    assert len(gate.handshakes.token) == 32
    assert gate.handshakes.token != PendingHandshakes[str](2, gate.away.append).token


@pytest.mark.parametrize(
    ("before", "after"), [(0, b""), (0, b"m"), (0, b"mee"), (31, b"me"), (33, b"me")]
)
def test_another_greeting_is_refused(gate: Gate, before: int, after: bytes) -> None:
    """A handshake whose token is too short, too long or wrong is refused."""
    token = (gate.handshakes.token + b"x")[:before] if before else gate.handshakes.token
    with pytest.raises((ConnectionError, ValueError)):
        gate.greet("a", token + after)


def test_a_token_is_wrong_by_any_of_its_bits(gate: Gate) -> None:
    for i in range(len(gate.handshakes.token)):
        token = bytearray(gate.handshakes.token)
        token[i] ^= 1
        with pytest.raises(ConnectionError):
            gate.greet(f"{i}", bytes(token) + b"me")


def test_who_hangs_up_or_is_turned_away_is_not_heard(gate: Gate) -> None:
    gate.handshakes.add("a")
    with pytest.raises(ConnectionError):
        gate.handshakes.feed("a", b"")
    gate.handshakes.forget("a")
    with pytest.raises(ConnectionError):
        gate.handshakes.feed("a", encode_frame(gate.handshakes.token + b"me"))


def test_strangers_are_few_and_the_oldest_go_first(gate: Gate) -> None:
    names = [f"{i}" for i in range(MAX_PENDING_HANDSHAKES + 3)]
    for name in names:
        gate.handshakes.add(name)
    assert gate.away == names[:3] and len(gate.handshakes._waiting) == MAX_PENDING_HANDSHAKES


def test_strangers_have_little_time_and_bytes_give_them_no_more(gate: Gate) -> None:
    gate.handshakes.add("early")
    gate.now += framing.GREETING_S / 2
    gate.handshakes.add("late")
    assert gate.handshakes.feed("early", b"\x00") is None
    gate.now += framing.GREETING_S / 2
    gate.handshakes.sweep()
    assert gate.away == ["early"] and len(gate.handshakes._waiting) == 1
