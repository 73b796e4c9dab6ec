"""``tandem generate``: one answer, from a server or from a cluster of its own."""

import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.client.client import AsyncClient
from cluster.client.options import GenerateOptions
from cluster.client.stream import Completion, completions_of
from cluster.commands.common import ConfigFile, Json, ListKeys, Sets, fail, run, running_server
from core.config import load
from core.request import ABORT, ERROR

MaxTokens = Annotated[int, typer.Option(help="Most tokens of the answer.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token every time.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")]
Acceptance = Annotated[
    Literal["strict", "relaxed", "relaxed_log_probs", "rejection", "rejection_greedy"],
    typer.Option(
        help="When a drafted token is accepted. strict: the same answer as without drafts. "
        "relaxed: faster, but lossy while the model thinks; temperature 0 only. "
        "rejection: sampled answers of the same distribution, though not the same answer."
    ),
]
RelaxedTopN = Annotated[
    int,
    typer.Option(
        help="relaxed: accept drafts among so many of the likeliest tokens; 0 is 1. "
        "Recipes for DeepSeek-R1 take 10 and a delta of 0.6."
    ),
]
RelaxedDelta = Annotated[
    float, typer.Option(help="relaxed: and at most this much less probable than the likeliest.")
]
Prompt = Annotated[
    str | None, typer.Argument(help="The text to continue; - or nothing reads stdin.")
]
PromptIds = Annotated[
    str | None,
    typer.Option("--token-ids", metavar="1,2,3", help="The prompt as token ids, used as they are."),
]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The server to ask; none starts a cluster for it."),
]


def generate(
    prompt: Prompt = None,
    token_ids: PromptIds = None,
    address: Address = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    acceptance: Acceptance = "strict",
    relaxed_top_n: RelaxedTopN = 0,
    relaxed_delta: RelaxedDelta = 0.0,
    as_json: Json = False,
    config: ConfigFile = None,
    sets: Sets = None,
    list_keys: ListKeys = False,
) -> None:
    """Answer one prompt; the text appears as it comes.

    \b
    Examples:
      tandem generate "def fibonacci(n):" --address 127.0.0.1:50051
      tandem generate "def fibonacci(n):" --set speculation.num_tokens=2
      cat prompt.txt | tandem generate --max-tokens 64 --temperature 0.8 --seed 7
      tandem generate --token-ids 0,17,42 --json
      tandem generate "<think>" --acceptance relaxed --relaxed-top-n 10 --relaxed-delta 0.6
    """
    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        acceptance=acceptance,
        relaxed_top_n=relaxed_top_n,
        relaxed_delta=relaxed_delta,
    )
    run(_generate(prompt, token_ids, address, options, as_json, config, sets))


async def _generate(
    prompt: str | None,
    token_ids: str | None,
    address: str | None,
    options: GenerateOptions,
    as_json: bool,
    config: Path | None,
    sets: list[str] | None,
) -> None:
    given = _prompt(prompt, token_ids)
    if address is not None:
        if config is not None or sets:
            raise ValueError(
                f"--address={address!r}: --config and --set are for a cluster of one's own; "
                "leave them out, or --address"
            )
        await _print_answer(address, given, options, as_json)
        return
    own = load(config, [*(sets or []), "server.address=127.0.0.1:0"])
    async with running_server(own) as server:
        await _print_answer(server.address, given, options, as_json)


def _prompt(prompt: str | None, token_ids: str | None) -> str | list[int]:
    if token_ids is not None:
        if prompt is not None:
            raise ValueError(f"--token-ids={token_ids!r}: give it or PROMPT, not both")
        try:
            return [int(token) for token in token_ids.split(",")]
        except ValueError as error:
            raise ValueError(f"--token-ids={token_ids!r}: write it as 1,2,3") from error
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise ValueError("PROMPT: give a text, --token-ids, or pipe the prompt in")
    return sys.stdin.read()


async def _print_answer(
    address: str, prompt: str | Sequence[int], options: GenerateOptions, as_json: bool
) -> None:
    pieces = []
    async with (
        AsyncClient(address) as client,
        aclosing(client.generate(prompt, **options)) as stream,
    ):
        async for piece in stream:
            pieces.append(piece)
            if not as_json:
                print(piece.text, end="", flush=True)
    [answer] = completions_of(pieces)
    if as_json:
        print(_as_json(answer), flush=True)
    elif sys.stdout.isatty():
        print()
    if answer.finished.finish_reason == ERROR:
        fail("INTERNAL", answer.finished.error or "the answer could not be finished")
    if answer.finished.finish_reason == ABORT:
        fail("ABORTED", "the request was aborted")


def _as_json(answer: Completion) -> str:
    told = {name: value for name, value in asdict(answer.finished).items() if value is not None}
    fields = {"text": answer.text, "token_ids": answer.token_ids} | told
    return json.dumps(fields, ensure_ascii=False)
