"""Prompts from files that the shipped checkpoint was not trained on."""

from functools import lru_cache

from tokenizers import Tokenizer

from tandem.core.config import TINY_MODEL
from training.corpus import held_out_prompts


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


def held_out(num: int, min_len: int, max_len: int, seed: int) -> list[list[int]]:
    return held_out_prompts(_tokenizer(), num, min_len, max_len, seed)
