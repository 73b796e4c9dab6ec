"""``tandem generate``: complete one prompt, on a running server or on a temporary local cluster."""

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
    """Options of ``tandem generate``. Request options are named as in ``GenerateOptions``."""

    prompt: Annotated[
        str | None, Argument(help="Text to continue. Without it, or with -, stdin is read.")
    ] = None
    token_ids: Annotated[
        str | None, Option(metavar="1,2,3", help="Prompt as token ids, used unchanged.")
    ] = None
    address: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT",
            help="Address of a running server. Default: a temporary local cluster.",
        ),
    ] = None
    max_tokens: Annotated[int, Option(help="Maximum number of output tokens.")] = 128
    temperature: Annotated[
        float, Option(help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.0
    seed: Annotated[
        int | None, Option(help="Seed that makes a sampled answer repeatable. Default: random.")
    ] = None
    skip_special_tokens: Annotated[
        bool, Option(help="Omit special tokens such as <think> from the text.")
    ] = True
    acceptance: Annotated[
        Literal[
            "strict", "relaxed", "relaxed_log_probs", "rejection", "rejection_greedy", "typical"
        ],
        Option(
            help="Rule by which drafted tokens are accepted. strict: same answer as without "
            "drafts. relaxed: faster, lossy while the model thinks; temperature 0 only. "
            "rejection: same distribution as without drafts, but not the same sample. "
            "typical: faster, lossy; temperature above 0 only."
        ),
    ] = "strict"
    relaxed_top_n: Annotated[
        int,
        Option(
            help="Relaxed acceptance: number of most likely tokens that a draft must be among. "
            "0 means 1. Recipes for DeepSeek-R1 use 10, with --relaxed-delta 0.6."
        ),
    ] = 0
    relaxed_delta: Annotated[
        float,
        Option(
            help="Relaxed acceptance: maximum difference from the most likely token's probability."
        ),
    ] = 0.0
    typical_epsilon: Annotated[
        float,
        Option(
            help="Typical acceptance: probability above which drafts are accepted. 0 means 0.09."
        ),
    ] = 0.0
    typical_alpha: Annotated[
        float,
        Option(
            help="Typical acceptance: alpha; drafts with p > alpha * exp(-entropy) are also "
            "accepted. 0 means 0.3."
        ),
    ] = 0.0
    as_json: Json = False
    config: ConfigFile = None
    sets: SetOptions = None
    list_keys: ListKeys = False

    def request_options(self) -> GenerateOptions:
        """Return the options that are part of the request."""
        names = GenerateOptions.__annotations__
        fields = {name: value for name, value in asdict(self).items() if name in names}
        return GenerateOptions(**fields)  # type: ignore[typeddict-item]


@with_options_of(GenerateCommandOptions)
def generate(**values: Any) -> None:
    """Complete one prompt and print the text as it is generated.

    \b
    Examples:
      tandem generate "def fibonacci(n):" --address 127.0.0.1:50051
      tandem generate "def fibonacci(n):" --set speculation.max_depth=2
      cat prompt.txt | tandem generate --max-tokens 64 --temperature 0.8 --seed 7
      tandem generate --token-ids 0,17,42 --json
      tandem generate "<think>" --acceptance relaxed --relaxed-top-n 10 \\
        --relaxed-delta 0.6
    """
    run_command(_generate(GenerateCommandOptions(**values)))


async def _generate(options: GenerateCommandOptions) -> None:
    prompt = _prompt(options.prompt, options.token_ids)
    address = options.address
    if address is not None and (options.config is not None or options.sets):
        raise ValueError(
            f"--address={address!r}: --config and --set configure a cluster that this command "
            "starts; leave them out, or --address"
        )
    server = temporary_server(options.config, options.sets)
    async with server if address is None else nullcontext(address) as server_address:
        await _print_answer(server_address, prompt, options)


def _prompt(prompt: str | None, token_ids: str | None) -> str | list[int]:
    if token_ids is not None:
        if prompt is not None:
            raise ValueError(
                f"--token-ids={token_ids!r}: cannot be combined with PROMPT; use one of them"
            )
        try:
            return [int(token) for token in token_ids.split(",")]
        except ValueError as error:
            raise ValueError(
                f"--token-ids={token_ids!r}: not a list of token ids; write 1,2,3"
            ) from error
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise ValueError("PROMPT: is missing; give a text or --token-ids, or pipe it to stdin")
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
