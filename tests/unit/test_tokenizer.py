"""Streamed text: no piece ends inside a character, and the pieces join to the whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import TINY_MODEL
from text.tokenizer import REPLACEMENT, TextStream, Tokenizer

TOKENIZER = Tokenizer(TINY_MODEL)


def stream(ids: list[int], sizes: list[int]) -> list[str]:
    text, pieces, start = TextStream(TOKENIZER), [], 0
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
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_any_tokens_stream_like_they_decode(ids: list[int]) -> None:
    """Broken bytes and special tokens included."""
    assert "".join(stream(ids, [1] * len(ids))) == TOKENIZER.decode(ids)


def test_a_character_of_several_tokens_is_held_back() -> None:
    ids = TOKENIZER.encode("a😀b")[1:]
    assert len(ids) > 3
    text = TextStream(TOKENIZER)
    pieces = [text.push([token]) for token in ids]
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]


def test_broken_bytes_are_told_and_cost_nothing_to_carry() -> None:
    """One U+FFFD is held back, as it may yet become a character; nothing piles up behind it."""
    broken = next(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.decode([i]) == REPLACEMENT)
    text = TextStream(TOKENIZER)
    assert [text.push([broken]) for _ in range(50)] == ["", *[REPLACEMENT] * 49]
    assert len(text._ids) <= 4
    assert text.finish() == REPLACEMENT


@pytest.mark.parametrize("silent", [0, 10**6])
def test_tokens_without_text_do_not_part_a_character(silent: int) -> None:
    """Special tokens, and ids of lm_head's padding rows, even amid the bytes of one character."""
    first, *rest = TOKENIZER.encode("😀")[1:]
    assert len(rest) == 3
    text = TextStream(TOKENIZER)
    assert text.push([first]) == ""
    assert [text.push([silent]) for _ in range(50)] == [""] * 50
    assert len(text._ids) <= 4
    assert text.push(rest) + text.finish() == "😀"


RAW = json.loads((TINY_MODEL / "tokenizer.json").read_text())
LONGEST = TOKENIZER.longest_token_bytes
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
        ({"truncation": {"max_length": 9, "strategy": "LongestFirst", "stride": 0,
                         "direction": "Right"}}, None),
    ],
)  # fmt: skip
def test_what_may_shorten_a_text_leaves_it_without_a_bound(
    tmp_path: Path, changes: dict[str, object], longest: int | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(RAW | changes))
    assert Tokenizer(tmp_path).longest_token_bytes == longest


def test_a_byte_without_a_token_leaves_a_text_without_a_bound(tmp_path: Path) -> None:
    vocab = {token: i for token, i in RAW["model"]["vocab"].items() if token != "z"}
    merges = [m for m in RAW["model"]["merges"] if "z" not in "".join(m)]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(RAW | {"model": RAW["model"] | {"vocab": vocab, "merges": merges}})
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("z" * 99) == [0] and tokenizer.longest_token_bytes is None


def test_begin_of_sentence_comes_once() -> None:
    ids = TOKENIZER.encode("x")
    assert ids[0] == 0 and ids.count(0) == 1
    assert TOKENIZER.decode(ids) == "x"


def test_a_tokenizer_without_post_processor_gets_its_bos(tmp_path: Path) -> None:
    raw = json.loads((TINY_MODEL / "tokenizer.json").read_text())
    raw["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    bos = raw["added_tokens"][0]["content"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": bos}}))
    assert Tokenizer(tmp_path).encode("x") == TOKENIZER.encode("x")
    without = {"bos_token": bos, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(without))
    assert Tokenizer(tmp_path).encode("x") == TOKENIZER.encode("x")[1:]


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer(tmp_path)


def test_importable_without_torch() -> None:
    code = "import sys, text.tokenizer, model.checkpoint.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
