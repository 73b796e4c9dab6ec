"""Requests with every option within its bounds, and their expected answers."""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tandem.cluster.client.options import Prompt
from tandem.cluster.gateway.checks import field_bounds
from tandem.core import request as kinds
from tandem.core.info import ModelInfo
from tandem.core.request import STOP, RawRequest, Request, SamplingParams, TokenBias
from tandem.core.stopping import remaining_budget, stop_ids, truncate_at_stop
from tandem.model.sampling.adjust import adjust, count_emitted, no_rules, set_rules
from tandem.model.sampling.sampler import SamplingRows, draw
from tandem.text.tokenizer import Tokenizer
from tests.sim.model import EOS, NUM_TOKENS, Logits

SEED_STEP, SEED_MASK = 0x9E3779B97F4A7C15, (1 << 63) - 1
"""Constants by which tandem.proto derives the seed of answer i."""
MAX_TOKENS = 1, 2, 4, 8, 16, 24
NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
USUAL = {
    "temperature": (0.0, 0.8, 1.5),
    "top_k": (0, 5),
    "top_p": (0.9, 1.0),
    "min_p": (0.0, 0.05),
    "repetition_penalty": (1.0, 1.2),
    "presence_penalty": (0.0, 0.5),
    "frequency_penalty": (0.0, 0.5),
}
RARE = 0.25
"""Share of requests that have a given option, or a number at one of its bounds."""
FIRST_CHAR, LAST_CHAR = ord("A"), ord("z")


@dataclass(frozen=True)
class Right:
    """An expected answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Order:
    """The request of a client: ``prompt`` and ``options`` as the typed client takes them."""

    prompt: Prompt
    options: dict[str, Any]
    max_model_len: int
    tokenizer: Tokenizer

    @property
    def num_answers(self) -> int:
        return int(self.options.get("n", 1))

    @cached_property
    def _prompt_ids(self) -> tuple[int, ...]:
        if isinstance(self.prompt, str):
            # Skip the slow tokeniser's own call, because this code runs in no process of the
            # cluster.
            ids = [self.tokenizer._tokenizer.token_to_id(char) for char in self.prompt]
            return (*self.tokenizer._prefix_ids, *ids)
        return tuple(self.prompt)

    def right(self, index: int, weights: str) -> Right:
        """Return the expected answer ``index`` of a checkpoint with these weights."""
        known = self.__dict__.setdefault("_right", {})
        if (index, weights) not in known:
            known[index, weights] = self._right_by(index, weights)
        found: Right = known[index, weights]
        return found

    def _right_by(self, index: int, weights: str) -> Right:
        given = {k: v for k, v in self.options.items() if k in SamplingParams.__slots__}
        given["seed"] = (given["seed"] + index * SEED_STEP) & SEED_MASK
        given["n"] = 1
        given["logit_bias"] = tuple(
            TokenBias(*item) for item in sorted(given.get("logit_bias", {}).items())
        )
        for name in ("stop", "stop_token_ids"):
            given[name] = tuple(given.get(name, ()))
        request = Request("right", self._prompt_ids, sampling=SamplingParams(**given))
        return expected(request, self.max_model_len, weights, self.tokenizer)


def expected(request: Request, max_model_len: int, weights: str, tokenizer: Tokenizer) -> Right:
    """Compute the answer of a cluster without faults token by token, without a cache."""
    sampling = request.sampling
    num_most = remaining_budget(len(request.prompt_ids), 0, sampling.max_tokens, max_model_len)
    stops = stop_ids(sampling, (EOS,))
    cpu = torch.device("cpu")
    rules = no_rules(1, NUM_TOKENS, cpu)
    set_rules(rules, 0, request, (), stops)
    rows, first = SamplingRows.of([sampling], cpu), torch.tensor([0])
    no_drafts = torch.zeros(1, 0, dtype=torch.int64)
    logits, output = Logits(request.prompt_ids, weights), list[int]()
    while True:
        num_1 = torch.tensor([len(output)])
        token_1 = draw(adjust(logits.next_1V(), rules, num_1, no_drafts), rows, num_1)
        output.append(token := int(token_1))
        count_emitted(rules, first, token_1.view(1, 1), torch.tensor([1]))
        kept, reason = truncate_at_stop((*output,), stops, num_most)
        ended = _stopped(kept, sampling, tokenizer, by_id=reason == STOP)
        if ended is not None:
            return Right(kept, ended, STOP)
        if reason is not None:
            shown = kept[:-1] if reason == STOP else kept
            return Right(kept, _text(shown, sampling, tokenizer), reason)
        logits.push(token)


def _text(token_ids: tuple[int, ...], sampling: SamplingParams, tokenizer: Tokenizer) -> str:
    skips = sampling.skip_special_tokens
    return tokenizer.decode(list(token_ids), skip_special_tokens=skips)


def _stopped(
    token_ids: tuple[int, ...], sampling: SamplingParams, tokenizer: Tokenizer, by_id: bool
) -> str | None:
    """Return the text before the stop string that the last token completes; None if there is
    none."""
    if by_id or not sampling.stop or len(token_ids) < sampling.min_tokens:
        return None
    before, now = (_text(ids, sampling, tokenizer) for ids in (token_ids[:-1], token_ids))
    for end in range(len(before) + 1, len(now) + 1):
        found = [stop for stop in sampling.stop if now[:end].endswith(stop)]
        if found:
            return now[: end - max(map(len, found))]
    return None


def draw_order(
    draw_: random.Random,
    max_model_len: int,
    tokenizer: Tokenizer,
    *,
    has_drafts: bool,
    max_answers: int,
) -> Order:
    """Return a random request that every gateway has to answer."""
    prompt: Prompt = [draw_.randrange(3, 90) for _ in range(draw_.randint(4, 60))]
    if draw_.random() < RARE:
        num_chars = draw_.randint(4, 60)
        prompt = "".join(chr(draw_.randint(FIRST_CHAR, LAST_CHAR)) for _ in range(num_chars))
    options: dict[str, Any] = {
        "max_tokens": draw_.choice(MAX_TOKENS),
        "seed": draw_.randrange(1 << 30),
        "ignore_eos": draw_.random() < 0.5,
    }
    options |= _numbers(draw_)
    options |= _lists(draw_, options["max_tokens"])
    options |= _acceptance(draw_, options["temperature"], has_drafts)
    if draw_.random() < RARE:
        options["n"] = draw_.randint(2, max_answers)
    return Order(prompt, options, max_model_len, tokenizer)


def _numbers(draw_: random.Random) -> dict[str, Any]:
    """Return numbers as users set them, or at the bounds that gateways have for them."""
    table = field_bounds(RawRequest(), _MODEL)
    options: dict[str, Any] = {}
    for name in NUMBERS:
        options[name] = draw_.choice(USUAL[name])
        if draw_.random() < RARE:
            bound = table[f"sampling.{name}"]
            options[name] = draw_.choice((bound.low, bound.high))
    return options


def _lists(draw_: random.Random, max_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if draw_.random() < RARE:
        biased = draw_.sample(range(3, NUM_TOKENS), 3)
        options["logit_bias"] = {token: draw_.uniform(-100, 100) for token in biased}
    if draw_.random() < RARE:
        chars = [chr(draw_.randint(FIRST_CHAR, LAST_CHAR)) for _ in range(6)]
        options["stop"] = [*chars[:4], "".join(chars[4:])]
    if draw_.random() < RARE:
        options["stop_token_ids"] = draw_.sample(range(NUM_TOKENS), 4)
    if draw_.random() < RARE:
        options["min_tokens"] = draw_.randint(0, max_tokens)
    if draw_.random() < RARE:
        options["logprobs"] = draw_.choice((0, 3, 20))
    if draw_.random() < RARE:
        options["skip_special_tokens"] = False
    return options


def _acceptance(draw_: random.Random, temperature: float, has_drafts: bool) -> dict[str, Any]:
    """Return a kind of acceptance with which the answer depends on the request alone.

    This excludes rejection of sampled tokens and typical acceptance of drafts.
    """
    if draw_.random() >= RARE:
        return {}
    if temperature == 0:
        return {"acceptance": draw_.choice((kinds.REJECTION, kinds.REJECTION_GREEDY))}
    if has_drafts:
        return {}
    options: dict[str, Any] = {"acceptance": kinds.TYPICAL}
    return options | {"typical_epsilon": draw_.uniform(0.01, 1.0), "typical_alpha": 1.0}


_MODEL = ModelInfo("sim", "deepseek_v3", 200, NUM_TOKENS, (EOS,), 0, False, "float32")
