"""Plans of requests: prompts from held-out files, options of all kinds, and planned ends."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from tandem.core.config import TINY_MODEL
from training.corpus import held_out_prompts

DROP, ABORT, DEADLINE = "drop", "abort", "deadline"
STOPS = ("\n\n", "self", "):", "return", " in ", "(", "import ", "=")
BATCH = 256
"""Prompts generated at a time."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of requests with each property. Other requests are greedy, n = 1, and run to their
    end."""

    cancel: float = 0.15
    deadline: float = 0.1
    stop: float = 0.15
    several: float = 0.05
    rules: float = 0.2
    logprobs: float = 0.15


@dataclass(frozen=True, slots=True)
class Plan:
    """One request.

    ``ending`` is empty, DROP, ABORT or DEADLINE. It happens at ``moment``, from 0 (at once) to 1
    (after the typical time of a whole answer).
    """

    name: str
    ids: list[int]
    options: dict[str, Any]
    ending: str
    moment: float


def plans(
    seed: int, num_requests: int | None, max_prompt: int, max_tokens: int, shares: Shares
) -> Iterator[Plan]:
    """Yield the same plans for the same arguments; endlessly if ``num_requests`` is None."""
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    generator = random.Random(seed)
    num = 0
    while num_requests is None or num < num_requests:
        for ids in held_out_prompts(tokenizer, BATCH, 1, max_prompt, generator.getrandbits(32)):
            if num == num_requests:
                return
            yield Plan(
                f"soak-{seed}-{num}",
                ids,
                _options(generator, max_tokens, shares, tokenizer.get_vocab_size()),
                _ending(generator, shares),
                generator.random(),
            )
            num += 1


def _options(
    generator: random.Random, max_tokens: int, shares: Shares, vocab_size: int
) -> dict[str, Any]:
    """Return options: half greedy, half sampled, plus rules, stop strings, log probabilities and
    n."""
    chosen: dict[str, Any] = {
        "max_tokens": generator.randint(1, max_tokens),
        "max_drafts": generator.randint(0, 3),
        "ignore_eos": generator.random() < 0.7,
    }
    if generator.random() < 0.5:
        chosen |= {
            "temperature": generator.uniform(0.3, 1.2),
            "seed": generator.getrandbits(63),
            "top_p": generator.choice([1.0, 0.9]),
            "top_k": generator.choice([0, 40]),
            "min_p": generator.choice([0.0, 0.0, 0.05]),
        }
    if generator.random() < shares.rules:
        chosen |= {
            "repetition_penalty": generator.uniform(1.0, 1.3),
            "presence_penalty": generator.uniform(-0.5, 1.0),
            "frequency_penalty": generator.uniform(-0.5, 1.0),
            "logit_bias": {generator.randrange(2, vocab_size): generator.uniform(-5, 5)},
        }
    if generator.random() < shares.stop:
        chosen["stop"] = generator.sample(STOPS, generator.randint(1, 3))
    elif generator.random() < shares.rules:
        chosen["min_tokens"] = generator.randint(1, chosen["max_tokens"])
    if generator.random() < shares.logprobs:
        chosen["logprobs"] = generator.randint(0, 5)
    if generator.random() < shares.several:
        chosen["n"] = generator.randint(2, 3)
    return chosen


def _ending(generator: random.Random, shares: Shares) -> str:
    place = generator.random()
    if place < shares.cancel:
        return generator.choice([DROP, ABORT])
    return DEADLINE if place < shares.cancel + shares.deadline else ""
