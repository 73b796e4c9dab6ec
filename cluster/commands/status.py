"""``tandem status``: what a server is, and how its nodes are doing."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.client.client import Client
from cluster.commands.common import DEFAULT_ADDRESS, Json, errors_reported
from core.info import PREFILL, STARTING, ModelInfo, ServerStatus

Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The server to ask.")]


def status(address: Address = DEFAULT_ADDRESS, as_json: Json = False) -> None:
    """Show the state of a server and of every node.

    \b
    Examples:
      tandem status
      tandem status --address 10.0.0.7:50051 --json
    """
    with errors_reported(), Client(address) as client:
        state = client.status()
        model = None if state.state == STARTING else client.model_info()
        if as_json:
            fields = asdict(state) | {"model": None if model is None else asdict(model)}
            print(json.dumps(fields, ensure_ascii=False))
        else:
            _show(address, state, model)


def _show(address: str, state: ServerStatus, model: ModelInfo | None) -> None:
    console = Console(highlight=False)
    console.print(
        f"{address}  {state.state}  mode {state.mode}  {state.num_running} running", markup=False
    )
    if model is not None:
        console.print(
            f"{model.name}  {model.architecture}  {model.dtype}  "
            f"up to {model.max_model_len} tokens  up to {model.num_draft_tokens} drafts per step",
            markup=False,
        )
    if state.nodes:
        console.print(node_table(state))


def node_table(state: ServerStatus) -> Table:
    """A line for each rank."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    names = [
        "node",
        "alive",
        "epoch",
        "rows",
        "free pages",
        "leases",
        "channels",
        "steps",
        "kernels",
    ]
    is_shared = any(node.balance_ratio for node in state.nodes)
    if is_shared:
        names.append("balance")
    for i, name in enumerate(names):
        table.add_column(
            name, no_wrap=i == 0, overflow="fold", justify="left" if i < 3 else "right"
        )
    for node in sorted(state.nodes, key=lambda node: (node.kind != PREFILL, node.name)):
        pages = f"{node.num_free_pages}/{node.num_pages}"
        alive = "yes" if node.alive else "NO"
        counts = (node.num_open_leases, node.num_channels, node.num_steps, node.kernels)
        cells = (node.name, alive, node.epoch, node.num_active_rows, pages, *counts)
        balance = [f"{node.balance_ratio:.2f}" if node.balance_ratio else ""] if is_shared else []
        table.add_row(*map(str, cells), *balance)
    return table
