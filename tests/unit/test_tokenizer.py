"""Streamed text: no piece ends inside a character, and the pieces join to the whole."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import TINY_MODEL
from model.tokenizer import REPLACEMENT, TextStream, Tokenizer

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


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system here') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("as_file", [True, False])
def test_the_checkpoints_own_chat_template(tmp_path: Path, as_file: bool) -> None:
    shutil.copy(TINY_MODEL / "tokenizer.json", tmp_path)
    bos = TOKENIZER._tokenizer.id_to_token(0)
    config: dict[str, object] = {"bos_token": {"content": bos}}
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config["chat_template"] = TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == TOKENIZER.encode("<user>hi<assistant>")
    with pytest.raises(ValueError, match="no system here"):
        tokenizer.encode_chat([{"role": "system", "content": "x"}])


def test_no_or_broken_chat_template_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        TOKENIZER.encode_chat([{"role": "user", "content": "hi"}])
    shutil.copy(TINY_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="not valid Jinja"):
        Tokenizer(tmp_path)


def test_importable_without_torch() -> None:
    code = "import sys, model.tokenizer, model.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
