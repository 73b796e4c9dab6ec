"""vLLM's API server, alone or split over NIXL, and a client. Run in its environment.

In split mode the client is the proxy, so no third process is involved. It requests one token from
the prefill server, and passes the returned KV transfer parameters to the decode server.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.versus.engines.pinning import sides
from benchmarks.versus.job import Job, Timeline, Trial, read_job, say, say_batch

START_TIMEOUT_S = 900.0
REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(job: Job, port: int) -> list[str]:
    args = ["--model", job.model_path, "--served-model-name", "model", "--dtype", job.dtype]
    args += ["--host", "127.0.0.1", "--port", str(port), "--no-enable-prefix-caching"]
    args += ["--max-model-len", str(job.max_model_len), "--max-num-seqs", str(job.max_sequences)]
    args += ["--max-num-batched-tokens", str(max(2048, job.max_model_len))]
    args += ["--disable-log-stats", "--disable-uvicorn-access-log", "--seed", "0"]
    if job.num_drafts:
        speculative = {"method": "mtp", "num_speculative_tokens": job.num_drafts}
        args += ["--speculative-config", json.dumps(speculative)]
    if job.options["is_split"]:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        args += ["--kv-transfer-config", json.dumps(transfer | {"kv_buffer_device": "cpu"})]
    return args


@contextmanager
def started(job: Job, cores: list[int]) -> Iterator[Server]:
    port, bound = free_port(), ",".join(map(str, cores))
    env = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments(job, port)],
        env=env,
        stdout=sys.stderr,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )
    try:
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


async def wait_ready(session: aiohttp.ClientSession, server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            raise RuntimeError(f"the API server ended with {code} while it started")
        try:
            async with session.get(f"{server.url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    raise TimeoutError(f"the API server was not ready after {START_TIMEOUT_S:.0f} s")


@dataclass
class Client:
    """A client of the servers. ``prefill`` is None if one server does both."""

    session: aiohttp.ClientSession
    decode: Server
    prefill: Server | None

    async def ask(
        self, trial: Trial, prompt: list[int], index: int, timeline: Timeline, began: float
    ) -> None:
        await trial.arrival(index, began)
        body: dict[str, Any] = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": trial.max_tokens,
            "ignore_eos": trial.ignore_eos,
            "temperature": trial.temperature,
            "seed": index,
            "return_token_ids": True,
        }
        if self.prefill is not None:
            body["kv_transfer_params"] = await self._prefilled(self.prefill, body)
        url = f"{self.decode.url}/v1/completions"
        async with self.session.post(url, json=body | {"stream": True}) as answer:
            await _check(answer)
            async for line in answer.content:
                text = line.decode().removeprefix("data:").strip()
                if text and text != "[DONE]":
                    now = time.perf_counter() - began
                    timeline.add(now, index, json.loads(text)["choices"][0]["token_ids"] or [])

    async def _prefilled(self, prefill: Server, body: dict[str, Any]) -> dict[str, Any]:
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **REMOTE}
        asked = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": wanted}
        async with self.session.post(f"{prefill.url}/v1/completions", json=asked) as answer:
            await _check(answer)
            params: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
        if not params:
            raise RuntimeError("the prefill server told nothing about its KV cache")
        return params

    async def run_batch(self, trial: Trial, prompts: list[list[int]]) -> Timeline:
        timeline, began = Timeline(len(prompts)), time.perf_counter()
        asks = (self.ask(trial, p, i, timeline, began) for i, p in enumerate(prompts))
        await asyncio.gather(*asks)
        return timeline


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:400]}")


async def run_trials(job: Job, servers: list[Server]) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for server in servers:
            await wait_ready(session, server)
        threads = len(sides(job.cores)[1]) if len(servers) > 1 else job.num_threads
        versions = {name: version(name) for name in ("vllm-cpu", "torch", "nixl")}
        say("ready", versions=versions, num_threads=threads)
        client = Client(session, servers[-1], servers[0] if len(servers) > 1 else None)
        for trial in job.in_turn():
            await client.run_batch(trial.warming(), trial.warm_up)
            for prompts in trial.batches:
                say_batch(trial, await client.run_batch(trial, prompts))


def main() -> None:
    job = read_job(Path(sys.argv[1]))
    groups = list(sides(job.cores)) if job.options["is_split"] else [job.cores]
    with ExitStack() as stack:
        servers = [stack.enter_context(started(job, cores)) for cores in groups]
        os.sched_setaffinity(0, groups[0])
        asyncio.run(run_trials(job, servers))
    say("end")


if __name__ == "__main__":
    main()
