"""Conversion of text to token ids, compared with AutoTokenizer and with the table of
docs/prompts.md."""

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tandem.cluster.gateway.checks import check_request
from tandem.core.config import TINY_MODEL
from tandem.core.info import ModelInfo
from tandem.core.request import RawRequest
from tandem.text.tokenizer import Tokenizer
from tests.often import often
from tests.tokenizer_folders import (
    CUT,
    FILLED,
    FOLDERS,
    template,
    texts,
    write_folder,
    write_tokenizer,
)

DOCS = Path(__file__).parents[2] / "docs" / "prompts.md"
BOS = "<｜begin▁of▁sentence｜>"
TINY_BOS = (BOS, 0)


def table() -> dict[str, tuple[str, str]]:
    """Return the tokens that Tandem and AutoTokenizer add for each folder, according to
    docs/prompts.md."""
    lines = DOCS.read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines]
    of_folders = [cells for cells in rows if len(cells) == 7 and set(cells[1]) - {"-"}]
    return {cells[1]: (cells[3], cells[4]) for cells in of_folders[1:]}


def words(tokenizer: Any, before: list[int], after: list[int]) -> str:
    """Return the token ids before and after a text in the notation of the table."""
    names = {"<s>": "BOS", BOS: "BOS", "<｜end▁of▁sentence｜>": "EOS"}
    added = [names[tokenizer.convert_ids_to_tokens(token)] for token in before]
    appended = [names[tokenizer.convert_ids_to_tokens(token)] for token in after]
    return " ".join([*added, "…", *appended]) if added or appended else "nothing"


def around(whole: list[int], part: list[int]) -> tuple[list[int], list[int]]:
    """Return the token ids before and after ``part`` in ``whole``."""
    start = next(i for i in range(len(whole)) if whole[i : i + len(part)] == part)
    return whole[:start], whole[start + len(part) :]


@pytest.mark.parametrize("num_texts", often([300, 2000], [300]))
@pytest.mark.parametrize("name", often(FOLDERS, [*FOLDERS][::2]))
def test_a_text_has_autotokenizers_ids_after_what_the_table_says(
    tmp_path: Path, name: str, num_texts: int
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    tokenizer = Tokenizer(write_folder(tmp_path, name))
    judge = AutoTokenizer.from_pretrained(tmp_path / name)
    ours, _ = around(tokenizer.encode("x"), judge.encode("x", add_special_tokens=False))
    found = (
        words(judge, ours, []),
        words(judge, *around(judge.encode("x"), judge.encode("x", add_special_tokens=False))),
    )
    assert found == table()[name]
    if name == "fallback-llama":  # transformers replaces tokenizer.json's pre-tokeniser here
        judge = AutoTokenizer.from_pretrained(write_folder(tmp_path, "fallback"))
    asked = list(texts(num_texts, seed))
    expected = judge(asked, add_special_tokens=False)["input_ids"]
    for text, ids in zip(asked, expected, strict=True):
        assert tokenizer.encode(text) == [*ours, *ids], text


def test_the_table_is_of_all_folders() -> None:
    assert table().keys() == FOLDERS.keys()


def test_transformers_is_no_oracle_where_it_replaces_the_pre_tokeniser(tmp_path: Path) -> None:
    """HF#45488: for ``LlamaTokenizerFast``, transformers replaces parts of tokenizer.json by its
    own."""
    replaced = AutoTokenizer.from_pretrained(write_folder(tmp_path, "fallback-llama"))
    read = AutoTokenizer.from_pretrained(write_folder(tmp_path, "fallback"))
    text = "x</s>y"
    assert replaced.encode(text, add_special_tokens=False) != read.encode(
        text, add_special_tokens=False
    )


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_the_class_that_a_folder_names_changes_no_text(
    tmp_path: Path, tokenizer_class: str
) -> None:
    folder = write_tokenizer(tmp_path, "tiny", {}, {"tokenizer_class": tokenizer_class})
    tokenizer = Tokenizer(folder)
    code = "def f(x):\n    return x"
    assert tokenizer.decode(tokenizer.encode(code)) == code
    assert tokenizer.encode(code) == Tokenizer(TINY_MODEL).encode(code)


@pytest.mark.parametrize("name", [name for name in FOLDERS if not name.startswith("v")])
def test_begin_of_sentence_is_not_added_to_a_text_that_begins_with_it(
    tmp_path: Path, name: str
) -> None:
    """Regression test for vllm#16976: a rendered chat text already starts with the token.
    DeepSeek's own tokenizers take a second to read."""
    tokenizer = Tokenizer(write_folder(tmp_path, name))
    begin = "<s>" if name.startswith("fallback") else BOS
    bos, *rest = tokenizer.encode(begin + "x")
    assert rest == tokenizer.encode("x")[-len(rest) :] and bos not in rest
    assert tokenizer.decode([bos], skip_special_tokens=False) == begin


def test_sections_that_cut_or_fill_a_text_never_apply(tmp_path: Path) -> None:
    """Regression test for dynamo#11792, where 38 tokens became 8."""
    text = "a text of sixty characters, which is longer than eight tokens"
    changes = {"truncation": CUT, "padding": FILLED | {"strategy": {"Fixed": 99}}}
    tokenizer = Tokenizer(write_tokenizer(tmp_path, "tiny", changes, {}))
    ids = tokenizer.encode(text)
    assert ids == Tokenizer(TINY_MODEL).encode(text) and tokenizer.decode(ids) == text
    model = ModelInfo("tiny", "deepseek_v3", len(ids), 2048, (1,), 3, True, "float32")
    with pytest.raises(ValueError, match=f"text: the prompt has {len(ids)} tokens; use at most"):
        check_request(RawRequest(prompt=text), model, tokenizer)
    fits = replace(model, max_model_len=len(ids) + 1)
    assert check_request(RawRequest(prompt=text), fits, tokenizer).prompt_ids == tuple(ids)


def test_dropout_of_training_never_applies(tmp_path: Path) -> None:
    model = json.loads((TINY_MODEL / "tokenizer.json").read_text())["model"]
    folder = write_tokenizer(tmp_path, "tiny", {"model": model | {"dropout": 0.5}}, {})
    text = "def __init__(self): return None " * 4
    assert Tokenizer(folder).encode(text) == Tokenizer(TINY_MODEL).encode(text)


NAMED = {"bos_token": BOS, "add_bos_token": True}


@pytest.mark.parametrize(
    ("processor", "config", "begin"),
    [
        (template(TINY_BOS), {"add_bos_token": False}, [0]),
        (template(TINY_BOS), {"add_bos_token": None, "bos_token": None}, [0]),
        (template(("<think>", 2)), {"add_bos_token": None}, [2]),
        (template(("<think>", 2)), NAMED, [0, 2]),
        (template(TINY_BOS, ("<think>", 2), appended=(("</think>", 3),)), NAMED, [0, 2]),
        (template(appended=(("</think>", 3),)), {"add_bos_token": None}, []),
        (template(appended=(("</think>", 3),)), NAMED, [0]),
        (None, NAMED, [0]),
        (None, {"bos_token": {"content": BOS}}, [0]),
        (None, {"add_bos_token": None}, []),
        (None, {"add_bos_token": False}, []),
    ],
)
def test_what_a_text_begins_with(
    tmp_path: Path, processor: dict[str, Any] | None, config: dict[str, Any], begin: list[int]
) -> None:
    """A post-processor that adds the token decides, otherwise the flag does. Tokens that the
    post-processor appends are left out."""
    folder = write_tokenizer(tmp_path, "tiny", {"post_processor": processor}, config)
    tokenizer = Tokenizer(folder)
    [_, x] = Tokenizer(TINY_MODEL).encode("x")
    assert tokenizer.encode("x") == [*begin, x]
    told = tokenizer.decode([*begin, x], skip_special_tokens=False)
    assert tokenizer.encode(told) == [*begin, x], "added once"
    told = tokenizer.decode([*begin[:1], x], skip_special_tokens=False)
    assert tokenizer.encode(told) == [*begin, x], "the first of two is added once too"


def test_the_name_of_the_token_may_stand_in_special_tokens_map(tmp_path: Path) -> None:
    changes, config = {"post_processor": None}, {"bos_token": None, "add_bos_token": True}
    folder = write_tokenizer(tmp_path, "tiny", changes, config)
    with pytest.raises(
        ValueError, match="add_bos_token is true, but bos_token=None is not a token"
    ):
        Tokenizer(folder)
    names = {"bos_token": {"content": BOS, "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    assert Tokenizer(folder).encode("x") == Tokenizer(TINY_MODEL).encode("x")


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing; give a checkpoint folder"):
        Tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    with pytest.raises(ValueError, match=r"tiktoken\.model .* convert_tiktoken_to_fast\("):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer(tmp_path)
