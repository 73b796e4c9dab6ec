"""Check whole answers against transformers' logits and the tokenizers library.

The oracle shares no code with the parts of Tandem that choose, cut and count tokens. The one
exception is the noise derived from a seed (``gumbel``), which tests/unit/test_sampling.py pins.

Shape legend: T tokens of an answer, V vocabulary, K most likely tokens.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from benchmarks.harness import tiny
from benchmarks.harness.exact import MARGIN
from tandem.core.answer import Delta, Finished, Piece, TokenLogprobs
from tandem.core.request import (
    LENGTH,
    REJECTION,
    REJECTION_GREEDY,
    RELAXED,
    RELAXED_LOG_PROBS,
    STOP,
    STRICT,
    TYPICAL,
    Request,
    SamplingParams,
    Speculation,
    TokenBias,
)
from tandem.model.sampling.sampler import gumbel
from tests.rig import Rig

UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Answered:
    """One received answer. ``cuts`` holds the number of tokens and the text after each piece."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    cuts: tuple[tuple[int, str], ...]
    finished: Finished

    @property
    def end(self) -> tuple[int, str]:
        """Number of tokens and finish reason."""
        return len(self.token_ids), self.finished.finish_reason


async def ask(cluster: Rig, request: Request) -> Answered:
    """Return the only answer to a request with n = 1."""
    [answer] = await ask_all(cluster, request)
    return answer


async def ask_all(cluster: Rig, request: Request) -> list[Answered]:
    """Return all n answers to a request, by index."""
    pieces = [piece async for piece in cluster.generate(request)]
    return [answer_of(pieces, index) for index in range(request.sampling.n)]


def answer_of(pieces: Sequence[Piece], index: int = 0) -> Answered:
    """Put the pieces of one answer together. Its Finished must be the last of them."""
    *deltas, finished = [piece for piece in pieces if piece.index == index]
    assert isinstance(finished, Finished), pieces
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    text, cuts = "", []
    for delta in deltas:
        assert isinstance(delta, Delta), pieces
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        text += delta.text
        cuts.append((len(token_ids), text))
    return Answered(token_ids, text, logprobs, tuple(cuts), finished)


class Reference:
    """The oracle for a checkpoint whose contexts end at ``max_model_len``."""

    def __init__(self, folder: Path, max_model_len: int, eos_ids: tuple[int, ...] = (1,)) -> None:
        self._folder = folder
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def check(self, request: Request, answer: Answered) -> None:
        """Assert that each token, the end, the text, log probabilities and usage are right."""
        seed = answer.finished.seed
        request = replace(request, sampling=replace(request.sampling, seed=seed))
        self._check_end(request, answer)
        self._check_usage(request, answer)
        prompt, before = list(request.prompt_ids), list(request.output_ids)
        tokens = list(answer.token_ids)
        if not tokens:
            return
        logits_TV = tiny.reference_logits(self._folder, prompt + before + tokens[:-1])
        logits_TV = logits_TV[-len(tokens) :]
        for i, (token, row_V) in enumerate(zip(tokens, logits_TV, strict=True)):
            adjusted_V = self._adjusted(row_V, prompt, before + tokens[:i], request.sampling)
            index = len(before) + i
            assert may_choose(token, adjusted_V, index, request), (i, request, answer)
        self._check_logprobs(request, answer, logits_TV.double().log_softmax(-1))

    def _stops(self, sampling: SamplingParams) -> set[int]:
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)}

    def _check_end(self, request: Request, answer: Answered) -> None:
        """Check that the answer ends at the earliest of the four possible ends: a stop token, a
        stop string, ``max_tokens``, the end of the context."""
        sampling, output = request.sampling, [*request.output_ids, *answer.token_ids]
        room = self._max_model_len - len(request.prompt_ids)
        stops = self._stops(sampling)
        text, num_by_text = self._text(output, sampling)
        num_by_token = next((i + 1 for i, one in enumerate(output) if one in stops), None)
        ends = [(num, STOP) for num in (num_by_text, num_by_token) if num is not None]
        ends.append((min(sampling.max_tokens, room), LENGTH))
        num, reason = min(ends, key=lambda end: end[0])
        found = len(output), answer.finished.finish_reason
        assert found == (num, reason), (request, answer)
        if num == num_by_token:
            assert num > sampling.min_tokens or not sampling.min_tokens, (request, answer)
        if not request.output_ids:
            assert answer.text == text, (request, answer)

    def _text(self, output: list[int], sampling: SamplingParams) -> tuple[str, int | None]:
        """Return the text, and how many tokens complete the first stop string (None: no stop
        string)."""
        stops, old = self._stops(sampling), ""
        for num, token in enumerate(output, start=1):
            if token in stops:
                return self._tokenizer.decode(output[: num - 1]), None
            text = self._tokenizer.decode(output[:num]).rstrip(UNFINISHED)
            found = [
                (at + len(stop), at)
                for stop in sampling.stop
                if (at := text.find(stop, max(0, len(old) - len(stop) + 1))) >= 0
            ]
            if found and num >= sampling.min_tokens:
                end = min(end for end, _ in found)
                return text[: min(start for e, start in found if e == end)], num
            old = text
        return self._tokenizer.decode(output), None

    def _check_usage(self, request: Request, answer: Answered) -> None:
        usage = answer.finished.usage
        expected = len(request.prompt_ids), len(answer.token_ids)
        assert (usage.prompt, usage.completion) == expected, answer
        assert 0 <= usage.cached <= usage.prompt, answer
        counts = answer.finished.speculation
        accepted, drafted = counts.accepted_per_position, counts.drafted_per_position
        assert counts.num_accepted == sum(accepted) <= max(0, usage.completion - 1), answer
        assert counts.num_drafted == sum(drafted) <= counts.num_nodes, answer
        assert list(accepted) == sorted(accepted, reverse=True), answer
        assert all(one <= other for one, other in zip(accepted, drafted, strict=True)), answer

    def _adjusted(
        self, logits_V: Tensor, prompt: list[int], output: list[int], s: SamplingParams
    ) -> Tensor:
        """Return the logits after bias, penalties and ``min_tokens``, computed token by token."""
        logits_V = logits_V.clone()
        for item in s.logit_bias:
            logits_V[item.token_id] += item.bias
        seen = torch.tensor([prompt + output])
        penalize = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)
        logits_V = penalize(seen, logits_V[None])[0]
        for token in set(output):
            logits_V[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
        if len(output) < s.min_tokens:
            logits_V[[*self._stops(s)]] = -math.inf
        return logits_V

    def _check_logprobs(self, request: Request, answer: Answered, log_p_TV: Tensor) -> None:
        num = request.sampling.logprobs
        if num is None:
            assert answer.logprobs == (), answer
            return
        rows = zip(answer.token_ids, log_p_TV, answer.logprobs, strict=True)
        for token, row_V, found in rows:
            top_K, found_K = row_V.topk(num).values, torch.tensor(found.top_logprobs).double()
            assert abs(found.logprob - float(row_V[token])) < MARGIN
            assert torch.allclose(found_K, top_K, atol=MARGIN, rtol=0)
            assert torch.allclose(row_V[list(found.top_ids)], top_K, atol=MARGIN, rtol=0)


def may_choose(token: int, adjusted_V: Tensor, index: int, request: Request) -> bool:
    """Whether the request may choose this token at this index of its answer; ties count. Kinds of
    acceptance other than strict may take any token whose probability is above 0."""
    sampling, is_strict = request.sampling, request.speculation.acceptance == STRICT
    if sampling.temperature == 0:
        best = float(adjusted_V.max()) - MARGIN if is_strict else -math.inf
        return float(adjusted_V[token]) > best
    log_p_V = (adjusted_V.double() / sampling.temperature).log_softmax(0)
    if not is_strict:
        return bool(filtered(log_p_V, sampling, MARGIN)[token])
    noise_V = gumbel(torch.tensor(sampling.seed), torch.tensor(index), len(log_p_V)).double()
    score_V = log_p_V + noise_V
    wide_V, narrow_V = (filtered(log_p_V, sampling, slack) for slack in (MARGIN, -MARGIN))
    best = float(score_V[narrow_V].max()) - MARGIN / sampling.temperature
    return bool(wide_V[token]) and float(score_V[token]) > best


def filtered(log_p_V: Tensor, s: SamplingParams, slack: float) -> Tensor:
    """Return a mask of the tokens that top-k, top-p and min-p keep. A positive ``slack`` also keeps
    tokens whose probability is within ``slack`` of an edge; a negative one drops them."""
    p_V, order_V = log_p_V.exp().sort(descending=True, stable=True)
    rank_V = torch.arange(len(p_V))
    top_k = s.top_k or len(p_V)
    stays_V = rank_V < top_k
    if slack > 0:
        stays_V = p_V > p_V[min(top_k, len(p_V)) - 1] * (1 - slack)
    mass_V = p_V * (rank_V < top_k)
    before_V = mass_V.cumsum(0) - mass_V
    if s.top_p < 1:
        stays_V &= before_V < s.top_p * mass_V.sum() + slack
    stays_V &= p_V >= s.min_p * p_V[0] * (1 - slack)
    stays_V[0] = True
    return torch.zeros_like(stays_V).scatter(0, order_V, stays_V)


class AnyRequests:
    """Random requests that use every request option, with values at the edges of their bounds.

    ``strict`` leaves the lossy kinds of acceptance out.
    """

    def __init__(self, seed: int, max_model_len: int, num_drafts: int, *, strict: bool) -> None:
        self._draw = random.Random(seed)
        self._seed = seed
        self._max_model_len = max_model_len
        self._num_drafts = num_drafts
        self._strict = strict
        self._prompts: list[tuple[int, ...]] = []
        self._num_made = 0

    def make(self) -> Request:
        """Return a new random request. Its prompt may equal an earlier one or be a prefix of
        one."""
        draw = self._draw
        self._num_made += 1
        sampling = SamplingParams(**self._sampling())
        speculation = Speculation(draw.choice([None, None, 0, 1, self._num_drafts]))
        if not self._strict:
            speculation = replace(speculation, **self._acceptance(sampling.temperature))
        name = f"any {self._seed} {self._num_made}".replace(" ", "-")
        return Request(name, self._prompt(), (), sampling, speculation)

    def resumed(self, request: Request, answer: Answered) -> tuple[Request, str]:
        """Return the request that a client sends to resume after a random piece, and the text until
        then."""
        num, text = self._draw.choice(answer.cuts)
        seed = answer.finished.seed
        sampling = replace(request.sampling, n=1, seed=seed)
        name, output = f"{request.request_id}-resumed", answer.token_ids[:num]
        return replace(request, request_id=name, output_ids=output, sampling=sampling), text

    def _prompt(self) -> tuple[int, ...]:
        draw, most = self._draw, self._max_model_len - 1
        if self._prompts and draw.random() < 0.3:
            known = draw.choice(self._prompts)
            return known[: draw.choice([len(known), draw.randint(1, len(known))])]
        length = draw.choice([1, 2, draw.randint(1, 40), most, most - 1, most - draw.randint(2, 9)])
        high = draw.choice([7, 2047])
        prompt = tuple(draw.randint(4, high) for _ in range(length))
        if not self._strict and draw.random() < 0.5:
            prompt = (2, *prompt[1:])
        self._prompts.append(prompt)
        return prompt

    def _sampling(self) -> dict[str, Any]:
        draw = self._draw
        max_tokens = draw.choice([1, 2, 3, draw.randint(1, 50), 50, 128, 5000])
        found: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": draw.random() < 0.5}
        found["seed"] = draw.choice([0, 7, 2**63 - 1, draw.getrandbits(63)])
        found["n"] = draw.choice([1, 1, 1, 2, 4])
        stops = {draw.choice([1, 2, 3, draw.randint(0, 2047)]) for _ in range(draw.randint(1, 5))}
        stops |= {*range(4, 2048, draw.choice([7, 20, 2048]))}
        biased = {draw.choice([0, 1, 2, 3, draw.randint(0, 2047)]) for _ in range(3)}
        biases = tuple(TokenBias(one, draw.choice([-100.0, 100, 5, 12])) for one in sorted(biased))
        texts = ["e", " ", "th", "the", "\n", "er ", "a", "😀"]
        rare = {
            "temperature": draw.choice([0.3, 0.8, 1.0, 2.0]),
            "repetition_penalty": draw.choice([0.5, 1.3, 2.0]),
            "presence_penalty": draw.choice([-2.0, 2.0, 0.5]),
            "frequency_penalty": draw.choice([-2.0, 2.0, 0.5]),
            "logit_bias": biases,
            "stop_token_ids": tuple(sorted(stops)),
            "stop": tuple(draw.sample(texts, draw.randint(1, 3))),
            "min_tokens": draw.randint(0, min(max_tokens, 30)),
            "logprobs": draw.choice([0, 1, 5, 20]),
            "top_k": draw.choice([1, 5, 50, 5000]),
            "top_p": draw.choice([0.1, 0.5, 0.9]),
            "min_p": draw.choice([0.01, 0.2]),
        }
        return found | {name: value for name, value in rare.items() if draw.random() < 0.35}

    def _acceptance(self, temperature: float) -> dict[str, Any]:
        draw = self._draw
        if temperature > 0:
            return {"acceptance": draw.choice([STRICT, REJECTION, REJECTION_GREEDY, TYPICAL])}
        kind = draw.choice([STRICT, REJECTION, RELAXED, RELAXED_LOG_PROBS])
        if kind in (STRICT, REJECTION):
            return {"acceptance": kind}
        top_n, delta = draw.choice([1, 5, 2048]), draw.choice([0.0, 0.1, 1.0])
        return {"acceptance": kind, "relaxed_top_n": top_n, "relaxed_delta": delta}
