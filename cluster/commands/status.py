"""``tandem status``: show the served model and the state of every rank."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tandem.cluster.client.client import Client
from tandem.cluster.commands.common import DEFAULT_ADDRESS, Json, report_errors
from tandem.core.info import DEGRADED, PREFILL, SERVING, STARTING, ModelInfo, ServerStatus

Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the server.")]


def status(address: Address = DEFAULT_ADDRESS, as_json: Json = False) -> None:
    """Show the state of a server and of every rank.

    The exit code is 0 if the server accepts requests (SERVING or DEGRADED),
    else 1. DEGRADED: some of the configured nodes are not ready.

    \b
    Examples:
      tandem status
      tandem status --address 10.0.0.7:50051 --json
    """
    with report_errors(), Client(address) as client:
        state = client.status()
        model = None if state.state == STARTING else client.model_info()
        if as_json:
            fields = asdict(state) | {"model": None if model is None else asdict(model)}
            print(json.dumps(fields, ensure_ascii=False))
        else:
            _show(address, state, model)
    if state.state not in (SERVING, DEGRADED):
        raise typer.Exit(1)


def _show(address: str, state: ServerStatus, model: ModelInfo | None) -> None:
    lines = [f"{address}  {state.state}  mode {state.mode}  {state.num_running} running"]
    if model is not None:
        lines += [
            f"{model.name}  {model.architecture}  {model.dtype}",
            f"up to {model.max_model_len} tokens  up to {model.num_draft_tokens} drafts per step",
        ]
    names_by_text: dict[str, list[str]] = {}
    for rank in state.ranks:
        is_well = f"kernels {rank.kernels}" if rank.alive else "no answer"
        names_by_text.setdefault(rank.cause or is_well, []).append(rank.name)
    if adopted := [rank.name for rank in state.ranks if 0 < rank.process_epoch < rank.epoch]:
        names_by_text["weights kept from an earlier epoch"] = adopted
    lines += [f"{', '.join(names)}: {text}" for text, names in names_by_text.items()]
    console = Console(highlight=False)
    console.print("\n".join(lines), markup=False)
    if any(rank.alive for rank in state.ranks):
        console.print(rank_table(state))


def rank_table(state: ServerStatus) -> Table:
    """Return a table with one row for each rank that is alive."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    names = ["rank", "epoch", "rows", "free tokens", "leases", "channels", "steps"]
    is_shared = any(rank.balance_ratio for rank in state.ranks)
    if is_shared:
        names.append("balance")
    for i, name in enumerate(names):
        table.add_column(name, no_wrap=True, justify="left" if i < 2 else "right")
    alive = [rank for rank in state.ranks if rank.alive]
    for rank in sorted(alive, key=lambda rank: (rank.kind != PREFILL, rank.name)):
        room = f"{rank.num_free_tokens}/{rank.max_tokens}"
        counts = (rank.num_open_leases, rank.num_channels, int(rank.counters.get("num_steps", 0)))
        cells = (rank.name, rank.epoch, rank.num_active_rows, room, *counts)
        balance = [f"{rank.balance_ratio:.2f}" if rank.balance_ratio else ""] if is_shared else []
        table.add_row(*map(str, cells), *balance)
    return table
