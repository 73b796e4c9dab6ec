"""What the commands share: options, errors on stderr, progress, a cluster of one's own."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.client_stream import InferenceError
from cluster.config import ServerConfig, TandemConfig, describe
from cluster.server import Server
from cluster.status_codes import status_of

DEFAULT_ADDRESS: str = ServerConfig().address
Progress = Callable[[str], None]


def _print_keys(wanted: bool) -> None:
    if wanted:
        typer.echo(describe())
        raise typer.Exit()


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML file with the cluster's configuration."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one key, such as decode.max_rows=32. Repeatable."
    ),
]
ListKeys = Annotated[
    bool,
    typer.Option(
        "--list-keys",
        callback=_print_keys,
        is_eager=True,
        help="Print every configuration key with its default and meaning, and exit.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address", help="Join this Ray cluster instead of starting one on this machine."
    ),
]


@contextmanager
def errors_reported() -> Iterator[None]:
    """Turn errors into ``error: CODE: details`` on stderr and exit code 1."""
    try:
        yield
    except InferenceError as error:
        fail(error.code.name, error.details)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        if isinstance(error, typer.Exit):
            raise
        status = status_of(error)
        fail(status.code.name, status.details)


def fail(code: str, details: str) -> None:
    """Say what went wrong, and exit with 1."""
    print(f"error: {code}: {details}", file=sys.stderr, flush=True)
    raise typer.Exit(1)


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """A function that shows what is going on: a spinner on a terminal, lines on a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("starting") as spinner:
        yield lambda text: spinner.update(text)


@asynccontextmanager
async def running_server(
    config: TandemConfig, ray_address: str | None = None
) -> AsyncIterator[Server]:
    """A server over a cluster of its own, ready; both are gone when the block ends."""
    from cluster.launcher import launch

    async with Server(config) as server:
        with progress_shown() as on_progress:
            cluster = launch(config, ray_address=ray_address, on_progress=on_progress)
            gateway = await cluster.__aenter__()
        ...
