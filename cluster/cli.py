"""The command line program ``tandem``."""

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
    """Run the program.

    Exit codes: 0 success, 1 failure, 2 invalid command line, 130 interrupted.
    """
    app()


if __name__ == "__main__":
    main()
