"""Workloads: prompts and lengths of requests, determined by the seed."""

import json
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.core.info import ModelInfo

TRACE_FIELDS = {"arrival_s", "prompt_tokens", "prompt_ids", "text", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send.

    ``arrival_s`` is seconds after the start of the trace; None outside of traces.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths of random requests in tokens.

    Ranges are (low, high), both inclusive. ``prefix_tokens`` 0: prompts share no prefix.
    """

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    num_prefixes: int = 1
    prefix_tokens: int = 0


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Parse ``LOW:HIGH`` or one number. Raises ``ValueError`` that names ``option``."""
    low, _, high = text.partition(":")
    try:
        parsed = int(low), int(high or low)
    except ValueError as error:
        raise ValueError(f"{option}={text!r}: write it as LOW:HIGH or one number") from error
    if not 1 <= parsed[0] <= parsed[1]:
        raise ValueError(f"{option}={text!r}: needs 1 <= LOW <= HIGH")
    return parsed


def random_prompt(model: ModelInfo, num_tokens: int, rng: random.Random) -> tuple[int, ...]:
    """Return random token ids without end-of-sequence tokens.

    Raises:
        ValueError: The prompt is too long for the model.
    """
    if num_tokens >= model.max_model_len:
        raise ValueError(
            f"a prompt of {num_tokens} tokens is too long for {model.name}: use fewer than "
            f"{model.max_model_len}"
        )
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        token = rng.randrange(model.vocab_size)
        if token not in model.eos_token_ids:
            tokens.append(token)
    return tuple(tokens)


def random_jobs(
    model: ModelInfo, num: int, shape: RandomLengths, seed: int, *, warm_up: bool = False
) -> list[Job]:
    """Return jobs whose prompts are a random shared prefix and a unique random suffix.

    Warm-up jobs have the same prefixes but different suffixes.

    Raises:
        ValueError: The longest request exceeds the model's maximum length.
    """
    longest = shape.prefix_tokens + shape.prompt_tokens[1] + shape.output_tokens[1]
    if longest > model.max_model_len:
        raise ValueError(
            f"prompt and answer may have up to {longest} tokens, but {model.name} supports "
            f"at most {model.max_model_len}; lower --prompt-tokens, --prefix-tokens or "
            "--output-tokens"
        )
    rng = random.Random(f"prefixes {seed}")
    prefixes = [random_prompt(model, shape.prefix_tokens, rng) for _ in range(shape.num_prefixes)]
    rng = random.Random(f"jobs {seed} {warm_up}")
    return [
        Job(
            rng.choice(prefixes) + random_prompt(model, rng.randint(*shape.prompt_tokens), rng),
            rng.randint(*shape.output_tokens),
        )
        for _ in range(num)
    ]


def trace_jobs(path: Path, model: ModelInfo, max_jobs: int, seed: int) -> list[Job]:
    """Return the jobs in the first ``max_jobs`` lines of a JSONL trace, ordered by arrival.

    Raises:
        ValueError: Names the invalid line and its mistake.
    """
    rng = random.Random(f"trace {seed}")
    jobs = []
    with path.open(encoding="utf-8") as lines:
        for number, line in islice(enumerate(lines, start=1), max_jobs):
            try:
                jobs.append(_trace_job(json.loads(line), model, rng))
            except (TypeError, ValueError) as error:
                raise ValueError(f"--trace={str(path)!r}, line {number}: {error}") from error
    num_timed = sum(job.arrival_s is not None for job in jobs)
    if not jobs or 0 < num_timed < len(jobs):
        raise ValueError(
            f"--trace={str(path)!r}: needs at least one job, and arrival_s in all lines or in none"
        )
    return sorted(jobs, key=lambda job: job.arrival_s or 0.0)


def _trace_job(fields: Any, model: ModelInfo, rng: random.Random) -> Job:
    if not isinstance(fields, dict) or not fields.keys() <= TRACE_FIELDS:
        raise ValueError(
            f"must be one JSON object with no fields except {', '.join(sorted(TRACE_FIELDS))}"
        )
    prompt: str | tuple[int, ...]
    match [fields.get(name) for name in ("prompt_tokens", "prompt_ids", "text")]:
        case [int(num), None, None] if num >= 1:
            prompt = random_prompt(model, num, rng)
        case [None, list(ids), None] if ids and all(type(i) is int for i in ids):
            prompt = tuple(ids)
        case [None, None, str(text)]:
            prompt = text
        case _:
            raise ValueError(
                "give exactly one valid prompt: prompt_tokens (at least 1), prompt_ids or text"
            )
    max_tokens = fields.get("max_tokens")
    arrival_s = fields.get("arrival_s")
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens!r}: use 1 or more")
    if arrival_s is not None and not 0 <= float(arrival_s) < float("inf"):
        raise ValueError(f"arrival_s={arrival_s!r}: use seconds, 0 or more")
    return Job(prompt, max_tokens, None if arrival_s is None else float(arrival_s))
