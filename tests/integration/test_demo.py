"""The demo's answers end by themselves and repeat no lines."""

from io import StringIO
from itertools import groupby

from rich.console import Console

from benchmarks.demo import PROMPTS, answer
from tandem import AsyncClient
from tandem.cluster.entrypoints.server import Server
from tandem.core.config import TINY_MODEL
from tandem.core.request import STOP
from tests.rig import rig


def longest_repeat(text: str) -> int:
    """Return the largest number of equal lines, or of equal words, in a row."""
    runs = [groupby(items) for items in (text.splitlines(), text.replace(".", " ").split())]
    return max(len(list(run)) for each in runs for _, run in each)


async def test_answers_end_by_themselves_and_do_not_repeat() -> None:
    async with (
        rig(TINY_MODEL, "server.address=127.0.0.1:0") as cluster,
        Server(cluster.config) as server,
        AsyncClient(server.address, retry_s=0) as client,
    ):
        await server.attach(cluster.gateway)
        for prompt in PROMPTS:
            shown = StringIO()
            row = await answer(client, Console(file=shown, width=200), prompt)
            text = shown.getvalue().removeprefix(prompt.text)
            assert row.finished.finish_reason == STOP, text
            assert len(text.strip()) > 40 and longest_repeat(text) <= 2, text
