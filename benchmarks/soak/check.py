"""Check answers, or the parts of them that arrived.

Plain greedy answers are compared with transformers. All others are compared with the same request
run alone without drafts. If a stop string may have cut the text, the whole text is compared.

A differing token passes only as a near tie (benchmarks/harness/exact.py). The reference's float64
top two, of logits or of log p plus noise, must be less than 1e-4 apart.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.exact import MARGIN, near_ties
from benchmarks.harness.tiny import reference_logits
from benchmarks.soak.load import Answer
from benchmarks.soak.plans import Plan
from tandem.cluster.gateway.fan_out import split_request
from tandem.core.config import TINY_MODEL
from tandem.core.request import Request, SamplingParams, TokenBias
from tandem.core.stopping import stop_ids
from tandem.model.sampling.adjust import adjust, no_rules, set_rules
from tandem.model.sampling.sampler import TORCH_SAMPLER, SamplingRows, gumbel
from tandem.text.tokenizer import Tokenizer

RunAlone = Callable[[Plan, dict[str, Any]], Awaitable[Answer]]
MAX_LOGPROB_GAP = 1e-3
"""Tolerance for log probabilities: a batch sums in another order than a request alone."""


@dataclass
class Checked:
    """Results of checks: ``wrong`` names answers and their faults, ``ties`` lists near ties."""

    num: int = 0
    wrong: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)


class Checker:
    """Checks answers. ``run_alone`` sends a request to the same model while nothing else runs."""

    def __init__(self, run_alone: RunAlone, eos_ids: tuple[int, ...]) -> None:
        self.found = Checked()
        self._run_alone = run_alone
        self._eos_ids = eos_ids
        self._tokenizer = Tokenizer(TINY_MODEL)

    async def check(self, answer: Answer) -> None:
        """Record the faults of an answer, or of the part of it that arrived."""
        name = f"{answer.plan.name}[{answer.index}]"
        self.found.num += 1
        try:
            if is_plain(answer.plan.options):
                ties = self._against_reference(answer)
            else:
                ties = await self._against_alone(answer)
            self.found.ties += [f"{name}: {tie}" for tie in ties]
        except AssertionError as error:
            self.found.wrong.append(
                f"{name}: prompt of {len(answer.plan.ids)}, {answer.plan.options}: {error}"
            )

    def _against_reference(self, answer: Answer) -> list[str]:
        ids, plan = answer.token_ids, answer.plan
        ties = near_ties(TINY_MODEL, plan.ids, ids)
        if answer.reason in ("stop", "length"):
            ended = answer.reason == "stop"
            assert ended == (ids[-1] in self._eos_ids and not plan.options["ignore_eos"])
            assert ended or len(ids) == plan.options["max_tokens"], f"{len(ids)} tokens"
            assert answer.text == self._tokenizer.decode(ids[:-1] if ended else ids)
        return ties

    async def _against_alone(self, answer: Answer) -> list[str]:
        request = to_request(answer)
        changes = {"max_drafts": 0, "n": 1, "seed": request.sampling.seed, "stop": ()}
        whole = await self._run_alone(answer.plan, changes)
        if answer.token_ids != whole.token_ids[: len(answer.token_ids)]:
            stops = stop_ids(request.sampling, self._eos_ids)
            ties = score_ties(request, answer.token_ids, stops)
            assert ties, f"{answer.token_ids}, alone {whole.token_ids}"
            return ties
        self._check_end(answer, whole)
        return []

    def _check_end(self, answer: Answer, whole: Answer) -> None:
        """Check text, end and log probabilities of tokens that are a prefix of ``whole``."""
        stop = answer.plan.options.get("stop", ())
        end = first_stop(whole.text, stop)
        text = whole.text if end is None else whole.text[:end]
        if answer.reason in ("stop", "length"):
            assert answer.text == text, f"text {answer.text!r}, expected {text!r}"
            if end is None:
                assert len(answer.token_ids) == len(whole.token_ids), "it ended too early"
                assert answer.reason == whole.reason, f"{answer.reason}, alone {whole.reason}"
            else:
                assert answer.reason == "stop", f"{answer.reason} at a stop string"
                before = self._tokenizer.decode(answer.token_ids[:-1])
                assert first_stop(before, stop) is None, "it went on after a stop string"
        else:
            assert text.startswith(answer.text), f"{answer.text!r} does not begin {text!r}"
        if "logprobs" in answer.plan.options:
            got = [entry.logprob for entry in answer.logprobs]
            expected = [entry.logprob for entry in whole.logprobs[: len(answer.token_ids)]]
            gaps = [abs(a - b) for a, b in zip(got, expected, strict=True)]
            assert max(gaps) < MAX_LOGPROB_GAP, f"log probabilities {got}, alone {expected}"


def is_plain(options: dict[str, Any]) -> bool:
    """Return whether each token is the argmax of the raw logits, and nothing cuts the text."""
    choosing = {"temperature", "logit_bias", "repetition_penalty", "min_tokens"}
    return not (choosing | {"stop", "logprobs", "n"}) & options.keys()


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Return the start of the stop string that is complete first, the longest of those; None
    without."""
    ends = [(start + len(s), start) for s in stops if (start := text.find(s)) >= 0]
    return min(ends)[1] if ends else None


def to_request(answer: Answer) -> Request:
    """Return the request that the gateway made for this answer."""
    known = SamplingParams.__dataclass_fields__.keys()
    options = {name: value for name, value in answer.plan.options.items() if name in known}
    bias = options.pop("logit_bias", {})
    options["logit_bias"] = tuple(TokenBias(token, value) for token, value in bias.items())
    options["stop"] = tuple(options.get("stop", ()))
    options.setdefault("seed", 0)
    request = Request(answer.plan.name, tuple(answer.plan.ids), sampling=SamplingParams(**options))
    return split_request(request)[answer.index]


def score_ties(
    request: Request, token_ids: list[int], stops: frozenset[int], folder: Path = TINY_MODEL
) -> list[str]:
    """Return near ties at which ``token_ids`` differ from the reference; assert on other
    differences.

    The reference chooses by float64 logits under the request's rules, with its noise.
    """
    ids = [*request.prompt_ids, *token_ids[:-1]]
    logits = reference_logits(folder, ids, torch.float64)[len(request.prompt_ids) - 1 :]
    places = []
    for i, token in enumerate(token_ids):
        top = _scores(request, logits[i], token_ids[:i], stops).topk(2)
        best, margin = int(top.indices[0]), float(top.values[0] - top.values[1])
        if token != best:
            assert margin < MARGIN and token in top.indices.tolist(), (
                f"token {i}: {token} emitted, reference says {best} by {margin:.6f}"
            )
            places.append(f"token {i}: {token} for {best}, margin {margin:.2e}")
    return places


def _scores(
    request: Request, logits_V: Tensor, output_ids: list[int], stops: frozenset[int]
) -> Tensor:
    sampling, device = request.sampling, logits_V.device
    index_1 = torch.tensor([len(output_ids)], device=device)
    rules = no_rules(1, logits_V.shape[0], device)
    set_rules(rules, 0, request, tuple(output_ids), stops)
    no_drafts = index_1.new_empty(1, 0)
    logits_1V = adjust(logits_V.unsqueeze(0), rules, index_1, no_drafts)
    if sampling.temperature == 0:
        return logits_1V[0]
    rows = SamplingRows.of([sampling], device)
    [log_p_1V] = TORCH_SAMPLER.filtered_log_probs(logits_1V.unsqueeze(1), rows)
    return (log_p_1V + gumbel(rows.seed_B, index_1, logits_V.shape[0]))[0]
