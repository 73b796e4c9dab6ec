"""Proxy variables do not affect calls to a server, unless the user opts in."""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tandem import AsyncClient, Client, InferenceError
from tests.integration.echo_gateway import EchoGateway, echo_server
from tests.integration.test_cli_edge import IMPORTS, expected, serving
from tests.warm import Warm

NOBODY = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), NOBODY)
OURS = Path(__file__).parents[2]
BEHIND_A_PROXY = Warm(f"import os\nos.environ.update({PROXIES!r})\n{IMPORTS}", "main()")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (_, address):
        yield address


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_client_reaches_its_server_without_the_proxy(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, NOBODY)
    async with echo_server(EchoGateway()) as server:
        async with AsyncClient(server.address, retry_s=0) as client:
            answer = await client.complete("abc", max_tokens=6)
            assert answer.token_ids == expected("abc", 6)
        monkeypatch.setenv("TANDEM_USE_PROXY", "1")
        async with AsyncClient(server.address, retry_s=0) as client:
            with pytest.raises(InferenceError) as caught:
                await client.status()
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE


def test_commands_reach_their_server_without_the_proxy(address: str) -> None:
    def run(*args: str) -> str:
        done = BEHIND_A_PROXY.run((*args, "--address", address), "", timeout_s=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    generated = json.loads(run("generate", "abc", "--json", "--max-tokens", "6"))
    assert tuple(generated["token_ids"]) == expected("abc", 6)
    assert "SERVING" in run("status")
    lengths = ("--prompt-tokens", "3:8", "--output-tokens", "5:9")
    assert "4" in run("bench", "--num-requests", "4", *lengths)


def test_a_blocking_client_reaches_its_server_without_the_proxy(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", NOBODY)
    with Client(address, retry_s=0) as client:
        assert client.status().state == "SERVING"


def test_no_channel_is_opened_without_these_options() -> None:
    files = (path for folder in ("cluster", "benchmarks") for path in (OURS / folder).rglob("*.py"))
    texts = [text for path in files if "secure_channel" in (text := path.read_text("utf-8"))]
    assert texts and all("proxy_options()" in text for text in texts)
