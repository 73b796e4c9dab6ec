"""``tandem generate``: one answer, from a server or from a cluster of its own."""

import json
import sys
from contextlib import aclosing, nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Option

from tandem.cluster.client.client import AsyncClient
from tandem.cluster.client.options import GenerateOptions, Prompt
from tandem.cluster.client.stream import Completion, completions_of
from tandem.cluster.commands.common import (
    ConfigFile,
    Json,
    ListKeys,
    SetOptions,
    fail,
    run_command,
    temporary_server,
    with_options_of,
)
from tandem.core.request import ABORT, ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCommandOptions:
    """Every option of the command; those of the request are called as in ``GenerateOptions``."""

    prompt: Annotated[
        str | None, Argument(help="The text to continue; - or nothing reads stdin.")
    ] = None
    token_ids: Annotated[
        str | None, Option(metavar="1,2,3", help="The prompt as token ids, used as they are.")
    ] = None
    address: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="The server to ask; none starts a cluster for it."),
    ] = None
    max_tokens: Annotated[int, Option(help="Most tokens of the answer.")] = 128
    temperature: Annotated[float, Option(help="0 takes the likeliest token every time.")] = 0.0
    seed: Annotated[int | None, Option(help="Makes a sampled answer repeatable.")] = None
    skip_special_tokens: Annotated[
        bool, Option(help="Leave special tokens such as <think> out of the text.")
    ] = True
    acceptance: Annotated[
        Literal[
            "strict", "relaxed", "relaxed_log_probs", "rejection", "rejection_greedy", "typical"
        ],
        Option(
            help="When a drafted token is accepted. strict: the same answer as without drafts. "
            "relaxed: faster, but lossy while the model thinks; temperature 0 only. "
            "rejection: sampled answers of the same distribution, though not the same answer. "
            "typical: faster, but lossy; above temperature 0 only."
        ),
    ] = "strict"
    relaxed_top_n: Annotated[
        int,
        Option(
            help="relaxed: accept drafts among so many of the likeliest tokens; 0 is 1. "
            "Recipes for DeepSeek-R1 take 10 and a delta of 0.6."
        ),
    ] = 0
    relaxed_delta: Annotated[
        float, Option(help="relaxed: and at most this much less probable than the likeliest.")
    ] = 0.0
    typical_epsilon: Annotated[
        float, Option(help="typical: accept drafts more probable than this; 0 is 0.09.")
    ] = 0.0
    typical_alpha: Annotated[
        float, Option(help="typical: or than this times exp(-entropy); 0 is 0.3.")
    ] = 0.0
    as_json: Json = False
    config: ConfigFile = None
    sets: SetOptions = None
    list_keys: ListKeys = False

    def request_options(self) -> GenerateOptions:
        """The options that the request is made of."""
        names = GenerateOptions.__annotations__
        fields = {name: value for name, value in asdict(self).items() if name in names}
        return GenerateOptions(**fields)  # type: ignore[typeddict-item]


@with_options_of(GenerateCommandOptions)
def generate(**values: Any) -> None:
    """Answer one prompt; the text appears as it comes.

    \b
    Examples:
      tandem generate "def fibonacci(n):" --address 127.0.0.1:50051
      tandem generate "def fibonacci(n):" --set speculation.max_depth=2
      cat prompt.txt | tandem generate --max-tokens 64 --temperature 0.8 --seed 7
      tandem generate --token-ids 0,17,42 --json
      tandem generate "<think>" --acceptance relaxed --relaxed-top-n 10 --relaxed-delta 0.6
    """
    run_command(_generate(GenerateCommandOptions(**values)))


async def _generate(options: GenerateCommandOptions) -> None:
    prompt = _prompt(options.prompt, options.token_ids)
    address = options.address
    if address is not None and (options.config is not None or options.sets):
        raise ValueError(
            f"--address={address!r}: --config and --set are for a cluster of one's own; "
            "leave them out, or --address"
        )
    server = temporary_server(options.config, options.sets)
    async with server if address is None else nullcontext(address) as server_address:
        await _print_answer(server_address, prompt, options)


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


async def _print_answer(address: str, prompt: Prompt, options: GenerateCommandOptions) -> None:
    pieces = []
    async with (
        AsyncClient(address) as client,
        aclosing(client.generate(prompt, **options.request_options())) as stream,
    ):
        async for piece in stream:
            pieces.append(piece)
            if not options.as_json:
                print(piece.text, end="", flush=True)
    [answer] = completions_of(pieces)
    if options.as_json:
        print(_as_json(answer), flush=True)
    elif sys.stdout.isatty():
        print()
    if answer.finished.finish_reason == ERROR:
        fail("INTERNAL", answer.finished.error or "the answer could not be finished")
    if answer.finished.finish_reason == ABORT:
        fail("ABORTED", "the request was aborted")


def _as_json(answer: Completion) -> str:
    finished_fields = {
        name: value for name, value in asdict(answer.finished).items() if value is not None
    }
    fields = {"text": answer.text, "token_ids": answer.token_ids} | finished_fields
    return json.dumps(fields, ensure_ascii=False)
