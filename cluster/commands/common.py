"""Shared parts of the commands: options, errors on stderr, progress, a temporary local cluster."""

import asyncio
import inspect
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from tandem.cluster.client.stream import InferenceError
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.entrypoints.status_codes import status_of
from tandem.core.config import ServerConfig, TandemConfig, describe_keys, load

DEFAULT_ADDRESS: str = ServerConfig().address


def _print_keys(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(describe_keys())
        raise typer.Exit()


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML file with the cluster's configuration."),
]
SetOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Value of one configuration key, such as decode.max_num_seqs=32. Repeatable.",
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
Json = Annotated[bool, typer.Option("--json", help="Output as one JSON object.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="Address of the Ray cluster in which a Tandem cluster runs or is created. "
        "auto: the Ray cluster of this machine.",
    ),
]


def with_options_of(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes the fields of the dataclass ``options`` a command's options."""

    def declared(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = dict(options.__annotations__)
        return command

    return declared


def run_command(main: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine. Errors go to stderr as ``error: CODE: details``, with exit code 1.

    SIGTERM and SIGINT cancel the coroutine, so that everything it started is stopped too. The first
    SIGTERM also sets an alarm that ends the process if stopping takes too long. Later ones have no
    effect.
    """
    with report_errors():
        asyncio.run(_cancelled_by_sigterm(main))


async def _cancelled_by_sigterm(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        if not any(signal.getitimer(signal.ITIMER_REAL)):
            signal.setitimer(signal.ITIMER_REAL, ServerConfig().end_s)
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    await main


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an exception as ``error: CODE: details`` on stderr and exit with code 1.

    Interruptions exit with code 130.
    """
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except InferenceError as error:
        fail(error.code.name, error.details)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("error: CANCELLED: interrupted", file=sys.stderr, flush=True)
        raise typer.Exit(130) from None
    except Exception as error:
        status = status_of(error)
        fail(status.code.name, status.details)


def fail(code: str, details: str) -> NoReturn:
    """Print an error to stderr and exit with code 1."""
    print(f"error: {code}: {details}", file=sys.stderr, flush=True)
    raise typer.Exit(1)


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on stderr.

    Texts of the form "SUBJECT: text" replace the previous text of that subject. A terminal shows
    the latest text of each subject with a spinner; other outputs get a line for each change.
    """
    console = Console(stderr=True)
    latest = dict[str, str]()
    with console.status("") if console.is_terminal else nullcontext() as spinner:

        def show(text: str) -> None:
            subject = text[: text.find(": ") + 1]
            if latest.get(subject) == text:
                return
            latest[subject] = text
            if spinner is None:
                print(text, file=sys.stderr, flush=True)
            else:
                spinner.update(Text("\n".join(latest.values())))

        yield show


@asynccontextmanager
async def run_server(config: TandemConfig, ray_address: str | None = None) -> AsyncIterator[Server]:
    """Run a server and its cluster until the block ends. Yields the server once it serves.

    The listening address is bound first, so that a port in use is reported before a model is
    loaded.

    Args:
        config: Configuration of server and cluster.
        ray_address: Ray cluster in which to join a Tandem cluster, or to create one that outlives
            this process. None: a cluster that ends with the block.
    """
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(config))
        with show_progress() as on_progress:
            on_progress("importing torch and Ray")
            from tandem.cluster.control.launch import launch

            cluster = launch(config, ray_address=ray_address, on_progress=on_progress)
            gateway = await stack.enter_async_context(cluster)
        stack.push_async_callback(server.stop)
        await server.attach(gateway)
        yield server


@asynccontextmanager
async def temporary_server(config: Path | None, sets: list[str] | None) -> AsyncIterator[str]:
    """Run a local cluster and server on any free port until the block ends. Yields its address."""
    config_of_server = load(config, [*(sets or []), "server.address=127.0.0.1:0"])
    async with run_server(config_of_server) as server:
        yield server.address
