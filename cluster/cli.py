"""The command ``tandem``."""

import typer

from tandem.cluster.bench.command import bench
from tandem.cluster.commands.generate import generate
from tandem.cluster.commands.rebalance import rebalance
from tandem.cluster.commands.serve import serve
from tandem.cluster.commands.status import status
from tandem.cluster.commands.stop import stop

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve DeepSeek-V3-family models with prefill and decode on different nodes.",
    epilog="Start with: tandem generate 'def fibonacci(n):'",
)
for command in (serve, generate, status, rebalance, stop, bench):
    app.command()(command)


def main() -> None:
    """Exit code 0 is success, 1 a failed call, 2 a wrong command line, 130 an interruption."""
    app()


if __name__ == "__main__":
    main()
