"""The command ``tandem`` as a process, with the echo gateway instead of a cluster."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem import Client
from tests.integration.echo_gateway import ByteTokenizer, answer_to, text_of
from tests.warm import Warm

IMPORTS = """
import sys
from tests.integration import echo_gateway
sys.modules["tandem.cluster.control.launch"] = echo_gateway
from tandem.cluster.cli import main
"""
WARM = Warm(IMPORTS, "main()")
ANY_PORT = ("--set", "server.address=127.0.0.1:0")


def tandem(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return WARM.run(args, stdin or "", timeout_s=60)


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTS + "main()", "serve", *ANY_PORT, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready grpc=127.0.0.1:"), line
        yield process, line.strip().removeprefix("ready grpc=")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (_, address):
        yield address


def expected(text: str, num_tokens: int) -> tuple[int, ...]:
    return answer_to(tuple(ByteTokenizer().encode(text)), num_tokens)


def test_generate_prints_the_text_and_nothing_else(address: str) -> None:
    done = tandem("generate", "abc", "--address", address, "--max-tokens", "20")
    assert (done.returncode, done.stdout) == (0, text_of(expected("abc", 20)))
    assert done.stderr == ""


def test_generate_reads_the_prompt_from_stdin(address: str) -> None:
    for args in ([], ["-"]):
        done = tandem("generate", *args, "--address", address, "--max-tokens", "9", stdin="ab\n")
        assert done.stdout == text_of(expected("ab\n", 9))


def test_generate_json_is_one_object_with_the_fields_of_finished(address: str) -> None:
    args = ("--token-ids", "1,5,6", "--json", "--max-tokens", "12", "--seed", "9")
    args += ("--acceptance", "rejection_greedy", "--no-skip-special-tokens")
    done = tandem("generate", *args, "--address", address)
    fields = json.loads(done.stdout.splitlines()[-1])
    ids = answer_to((1, 5, 6), 12)
    assert (fields["token_ids"], fields["text"]) == (list(ids), text_of(ids))
    assert fields["usage"] == {"prompt": 3, "cached": 0, "completion": 12}
    assert (fields["finish_reason"], fields["seed"]) == ("length", 9)
    assert fields["kv_transfer"]["bytes"] == 10
    assert fields["speculation"]["accepted_per_position"] == [1, 1, 0]
    assert fields["timings_ms"]["total"] == 5.0


def test_generate_without_an_address_starts_a_cluster_for_it() -> None:
    done = tandem("generate", "abc", "--max-tokens", "8", "--set", "mode=colocated")
    assert (done.returncode, done.stdout) == (0, text_of(expected("abc", 8)))
    assert "launching colocated" in done.stderr


def test_status_shows_every_node(address: str) -> None:
    done = tandem("status", "--address", address)
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("SERVING", "decode-0", "2/3", "echo"))
    fields = json.loads(tandem("status", "--address", address, "--json").stdout)
    assert (fields["state"], fields["ranks"][0]["num_open_leases"]) == ("SERVING", 4)
    assert fields["model"]["vocab_size"] == 300


@pytest.mark.parametrize(("max_rows", "code"), [(1, 0), (2, 1)])
def test_the_exit_code_of_status_says_whether_it_serves(max_rows: int, code: int) -> None:
    """DEGRADED serves, NOT_SERVING does not. The echo gateway derives its state from the config."""
    with serving("--set", f"decode.max_num_seqs={max_rows}") as (_, address):
        for args in ((), ("--json",)):
            done = tandem("status", "--address", address, *args)
            assert done.returncode == code
            assert ("NOT_SERVING" if code else "DEGRADED") in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "a", "--temperature", "-1"], "INVALID_ARGUMENT: sampling.temperature=-1.0"),
        (["generate", "a", "--token-ids", "1"], "INVALID_ARGUMENT: --token-ids='1': cannot be"),
        (["generate", "--token-ids", "x"], "INVALID_ARGUMENT: --token-ids='x': not a list"),
        (["generate", ""], "INVALID_ARGUMENT: text='': the prompt is empty"),
        (["generate", "a", "--acceptance", "relaxed"], "acceptance='ACCEPTANCE_RELAXED': echo has"),
        (
            ["generate", "a", "--relaxed-top-n", "2"],
            "INVALID_ARGUMENT: speculation.relaxed_top_n=2",
        ),
        (["generate", "a", "--set", "kv.page=1"], "did you mean 'kv.page_size'?"),
    ],
)
def test_a_mistake_is_told_on_stderr(args: list[str], message: str) -> None:
    done = tandem(*args)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_an_unreachable_server_is_told(address: str) -> None:
    done = tandem("status", "--address", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: UNAVAILABLE: ")
    done = tandem("generate", "a", "--address", address, "--set", "kv.page_size=8")
    assert "error: INVALID_ARGUMENT: --address=" in done.stderr


def test_serving_on_a_port_in_use_is_told(address: str) -> None:
    done = tandem("serve", "--set", f"server.address={address}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: INVALID_ARGUMENT: server.address=" in done.stderr
    assert "launching" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_well(number: signal.Signals) -> None:
    with serving() as (process, _):
        process.send_signal(number)
        rest, _ = process.communicate(timeout=20)
        assert (process.returncode, rest) == (0, "")


def test_a_drain_ends_streams_that_hold_out() -> None:
    with serving("--set", "server.drain_timeout_s=0.3", "--set", "model.max_model_len=2") as (
        process,
        address,
    ):
        with Client(address, retry_s=0) as client:
            stream = client.generate("abc")
            assert next(stream).token_ids == expected("abc", 2)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(Exception, match="UNAVAILABLE: the server shut down"):
                list(stream)
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_a_second_signal_does_not_wait() -> None:
    with serving("--set", "model.max_model_len=2") as (process, address):
        with Client(address, retry_s=0) as client:
            stream = client.generate("abc")
            next(stream)
            process.send_signal(signal.SIGTERM)
            while client.status().state != "DRAINING":
                pass
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
        assert process.returncode == 130


@pytest.mark.parametrize("command", ["serve", "generate", "status", "stop"])
def test_help_teaches_by_example(command: str) -> None:
    done = tandem(command, "--help")
    assert done.returncode == 0 and f"tandem {command}" in done.stdout


def test_list_keys_prints_the_configuration() -> None:
    done = tandem("serve", "--list-keys")
    assert done.returncode == 0 and "kv_transfer.staging_bytes" in done.stdout


CLEANING = """
import asyncio, signal
from tandem.cluster.commands.common import run_command

async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleaning", flush=True)
        await told.wait()
        print("clean", flush=True)

run_command(main())
"""


def test_a_second_signal_does_not_cut_short_how_a_command_ends() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", CLEANING], **pipes) as process:
        assert process.stdout is not None
        for heard in ("ready", "cleaning"):
            assert process.stdout.readline().strip() == heard
            process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=60)[0].strip() == "clean"
