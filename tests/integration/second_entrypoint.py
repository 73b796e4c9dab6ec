"""Checks for an entrypoint that a patch added in addition to gRPC.

Run it in the patched copy of the tree, with the folder of a checkpoint.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tandem import AsyncClient, InferenceError
from tandem.cluster.entrypoints.server import Server
from tests.integration.test_cli_edge import serving
from tests.rig import Rig, rig

PROMPT = [5, 6, 7]


async def ask(address: str, **fields: Any) -> list[dict[str, Any]]:
    """Return every line of the answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(json.dumps(fields).encode() + b"\n")
    lines = [json.loads(line) async for line in reader]
    writer.close()
    return lines


async def refusal_of(address: str, **fields: Any) -> str:
    [line] = await ask(address, **fields)
    kind, text = line["Failure"]["kind"], line["Failure"]["text"]
    return f"{kind}: {text}"


async def check(cluster: Rig, server: Server, client: AsyncClient) -> None:
    planted = server.addresses["echo"]
    assert planted is not None and server.addresses["grpc"] == server.address
    assert (await refusal_of(planted, prompt="x")).startswith("Draining: the server is still start")
    await server.attach(cluster.gateway)

    sampling = {"max_tokens": 12, "ignore_eos": True}
    *deltas, last = await ask(planted, prompt=PROMPT, sampling=sampling)
    answer = await client.complete(PROMPT, max_tokens=12, ignore_eos=True)
    tokens = [token for delta in deltas for token in delta["Delta"]["token_ids"]]
    assert tuple(tokens) == answer.token_ids
    assert "".join(delta["Delta"]["text"] for delta in deltas) == answer.text
    assert last["Finished"]["finish_reason"] == "length"

    try:
        await client.complete(PROMPT, top_p=1.5)
        raise AssertionError("gRPC let it in")
    except InferenceError as error:
        told = error.details
    assert (
        await refusal_of(planted, prompt=PROMPT, sampling={"top_p": 1.5}) == f"ValueError: {told}"
    )
    assert "sampling.top_p=1.5: use a number above 0" in told
    assert "top_q" in await refusal_of(planted, prompt=PROMPT, sampling={"top_q": 1.0})

    pieces = client.generate(PROMPT, max_tokens=1000, ignore_eos=True, request_id="same")
    await anext(pieces)
    assert "is running" in await refusal_of(planted, prompt=PROMPT, request_id="same")
    await pieces.aclose()

    await server.drain()
    assert "shutting down" in await refusal_of(planted, prompt=PROMPT)
    await cluster.check_empty()


async def main(path: Path) -> None:
    async with (
        rig(path, "server.address=127.0.0.1:0") as cluster,
        Server(cluster.config) as server,
        AsyncClient(server.address, retry_s=0) as client,
    ):
        await check(cluster, server, client)
    with serving() as (_, addresses):
        assert " echo=127.0.0.1:" in addresses, addresses


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
