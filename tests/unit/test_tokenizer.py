"""Streamed text: no piece ends inside a character, and the pieces join to the whole."""

import json
import random
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.config import TINY_MODEL
from tandem.text.tokenizer import TextStream, Tokenizer
from tests.tokenizer_folders import CUT, FILLED, write_folder, write_tokenizer

TOKENIZER = Tokenizer(TINY_MODEL)
REPLACEMENT_CHAR = "\ufffd"


def stream(
    ids: list[int], sizes: list[int], tokenizer: Tokenizer = TOKENIZER, *, skips: bool = True
) -> list[str]:
    text = TextStream(tokenizer, skip_special_tokens=skips)
    pieces, start = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(text.push(ids[start : start + size]))
        start += size
    return [*pieces, text.finish()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(0, 4), max_size=60))
def test_pieces_join_to_the_text(text: str, sizes: list[int]) -> None:
    ids = TOKENIZER.encode(text)
    pieces = stream(ids, sizes)
    assert "".join(pieces) == TOKENIZER.decode(ids) == text
    if REPLACEMENT_CHAR not in text:
        assert not any(REPLACEMENT_CHAR in piece for piece in pieces)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.booleans())
def test_any_tokens_stream_like_they_decode(ids: list[int], skips: bool) -> None:
    """Covers broken bytes and special tokens."""
    pieces = stream(ids, [1] * len(ids), skips=skips)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skips)


@pytest.fixture(scope="session", params=["v3", "v4", "fallback"])
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path_factory.mktemp("tokenizers"), request.param))


@pytest.mark.parametrize("num", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_random_tokens_of_published_tokenizers_stream_like_they_decode(
    published: Tokenizer, num: int
) -> None:
    """Half of the tokens end or start inside a character; some are special or beyond the
    vocabulary."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    size = published.vocab_size
    broken = [i for i in range(size) if REPLACEMENT_CHAR in published.decode([i])]
    for _ in range(num):
        common, skips = generator.random(), generator.random() < 0.5
        ids = [
            generator.choice(broken)
            if generator.random() < common
            else generator.randrange(size + 2)
            for _ in range(generator.randint(1, 24))
        ]
        sizes = [generator.randint(0, 4) for _ in range(8)]
        pieces = stream(ids, sizes, published, skips=skips)
        assert "".join(pieces) == published.decode(ids, skip_special_tokens=skips), ids


@pytest.mark.parametrize("text", ["你", "a😀b", "the 你好世界 def 😀😀", " two  spaces", "é"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_characters_of_several_byte_tokens_stream_whole(
    tmp_path: Path, text: str, size: int
) -> None:
    """vLLM's and others' byte-fallback streams lost or broke such characters (tokenizers#1141)."""
    tokenizer = Tokenizer(write_folder(tmp_path, "fallback"))
    ids = tokenizer.encode(text)
    pieces = stream(ids, [size] * len(ids), tokenizer)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any(REPLACEMENT_CHAR in piece for piece in pieces)


def test_bytes_that_are_no_text_are_sent_when_their_run_ends(tmp_path: Path) -> None:
    """One U+FFFD is sent for each byte of the run, also for complete characters, as the library
    decodes it."""
    tokenizer = Tokenizer(write_folder(tmp_path, "fallback"))
    [*head, letter] = tokenizer.encode("你x")
    text = TextStream(tokenizer)
    assert [text.push([token]) for token in head] == [""] * len(head)
    assert text.push([head[-1]]) == ""
    assert text.push([letter]) == REPLACEMENT_CHAR * 4 + "x"


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STEPS = [{"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "decoders": [REPLACE, *STEPS, STRIP | {"stop": 1}]},
        {"type": "Sequence", "decoders": [*STEPS, REPLACE]},
        {
            "type": "Sequence",
            "decoders": [REPLACE | {"pattern": {"Regex": "▁"}}, *STEPS],
        },
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(
    tmp_path: Path, decoder: dict[str, object] | None
) -> None:
    folder = write_tokenizer(tmp_path, "fallback", {"decoder": decoder}, {})
    with pytest.raises(ValueError, match=r"tokenizer\.json: decoder=.*; use ByteLevel, or"):
        Tokenizer(folder)


@pytest.mark.parametrize("steps", [[], [REPLACE, REPLACE | {"pattern": {"String": "e"}}]])
@pytest.mark.parametrize("strip", [[], [STRIP], [STRIP | {"start": 3}]])
def test_variants_of_byte_fallback_stream_like_they_decode(
    tmp_path: Path, steps: list[dict[str, object]], strip: list[dict[str, object]]
) -> None:
    decoder = {"type": "Sequence", "decoders": [*steps, *STEPS, *strip]}
    tokenizer = Tokenizer(write_tokenizer(tmp_path, "fallback", {"decoder": decoder}, {}))
    for text in ("    the 你", "  ", "", "你 the"):
        ids = tokenizer.encode(text)
        assert "".join(stream(ids, [1] * len(ids), tokenizer)) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_is_held_back() -> None:
    ids = TOKENIZER.encode("a😀b")[1:]
    assert len(ids) > 3
    text = TextStream(TOKENIZER)
    pieces = [text.push([token]) for token in ids]
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]


def test_broken_bytes_are_sent_as_soon_as_no_character_can_come_of_them() -> None:
    first, second, *_ = TOKENIZER.encode("😀")[1:]
    text = TextStream(TOKENIZER)
    assert [text.push([first]) for _ in range(50)] == ["", *[REPLACEMENT_CHAR] * 49]
    assert text.finish() == REPLACEMENT_CHAR
    text = TextStream(TOKENIZER)
    assert [text.push([second]) for _ in range(50)] == [REPLACEMENT_CHAR] * 50
    assert text.finish() == ""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_scripts_beside_an_unfinished_character_are_sent_once(size: int) -> None:
    """Regression test for sglang#31598: a CJK character next to a cut one was sent twice."""
    ids = TOKENIZER.encode("A 世a界😀 b")[1:]
    for end in range(1, len(ids) + 1):
        pieces = stream(ids[:end], [size] * len(ids))
        assert "".join(pieces) == TOKENIZER.decode(ids[:end])


@pytest.mark.parametrize("silent", [0, 10**6])
def test_tokens_without_text_do_not_part_a_character(silent: int) -> None:
    """Special tokens, and ids of lm_head's padding rows, may come amid the bytes of one
    character."""
    first, *rest = TOKENIZER.encode("😀")[1:]
    assert len(rest) == 3
    text = TextStream(TOKENIZER)
    assert text.push([first]) == ""
    assert [text.push([silent]) for _ in range(50)] == [""] * 50
    assert text.push(rest) + text.finish() == "😀"


RAW = json.loads((TINY_MODEL / "tokenizer.json").read_text())
LONGEST = TOKENIZER.max_token_bytes
SPLIT = {"type": "Split", "pattern": {"Regex": r"\s+"}, "invert": False}
BYTE_LEVEL = RAW["pre_tokenizer"]


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(" \n=aé", max_size=200))
def test_no_token_stands_for_more_bytes_than_the_longest(text: str) -> None:
    assert LONGEST is not None
    assert len(text.encode()) <= LONGEST * len(TOKENIZER.encode(text))


def test_every_token_as_a_text_of_its_own_is_within_the_longest() -> None:
    sizes = [
        len(TOKENIZER._tokenizer.decode([i], skip_special_tokens=False).encode())
        for i in range(TOKENIZER.vocab_size)
    ]
    assert max(sizes) == LONGEST


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, LONGEST),
        ({"normalizer": {"type": "Sequence", "normalizers": []}}, LONGEST),
        ({"normalizer": {"type": "NFC"}}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}}, None),
        ({"pre_tokenizer": None}, None),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                SPLIT | {"behavior": "Isolated"}, BYTE_LEVEL]}},
            LONGEST,
        ),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                SPLIT | {"behavior": "Removed"}, BYTE_LEVEL]}},
            None,
        ),
        ({"added_tokens": [RAW["added_tokens"][0] | {"lstrip": True}]}, None),
        ({"truncation": CUT, "padding": FILLED}, LONGEST),
    ],
)  # fmt: skip
def test_what_may_shorten_a_text_leaves_it_without_a_bound(
    tmp_path: Path, changes: dict[str, object], longest: int | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(RAW | changes))
    assert Tokenizer(tmp_path).max_token_bytes == longest


def test_a_byte_without_a_token_leaves_a_text_without_a_bound(tmp_path: Path) -> None:
    vocab = {token: i for token, i in RAW["model"]["vocab"].items() if token != "z"}
    merges = [m for m in RAW["model"]["merges"] if "z" not in "".join(m)]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(RAW | {"model": RAW["model"] | {"vocab": vocab, "merges": merges}})
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("z" * 99) == [0] and tokenizer.max_token_bytes is None


def test_importable_without_torch() -> None:
    modules = "tandem.text.tokenizer, tandem.model.checkpoint.config"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
