"""deploy/components/monitoring with a real Prometheus.

After a minute of load, all metrics that the dashboard and the alerts query exist. Their counts
equal those of the clients.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.procs import RayHead, actors, free_port, ray_head, serving
from tandem import Client, Finished, InferenceError
from tests.deployed import DEPLOY
from tests.integration.test_lost_prefill import prompts
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus"),
]
HERE = DEPLOY / "components" / "monitoring"
SETS = "prefill.dp_size=2", "decode.dp_size=2", "kv.num_pages=300", "kv.page_size=16"
NUM_CLIENTS, NUM_ROUNDS = 4, 30


@dataclass(frozen=True)
class Prometheus:
    address: str

    def get(self, path: str, **fields: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            told = json.loads(answer.read())
        assert told["status"] == "success"
        return told["data"]

    def values(self, query: str) -> list[float]:
        return [float(one["value"][1]) for one in self.get("query", query=query)["result"]]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes ``target`` every second and loads the alerts of deploy/."""
    rules = yaml.safe_load((HERE / "rules.yaml").read_text())["spec"]
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    job = {"job_name": "tandem", "static_configs": [{"targets": [target]}]}
    told = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": told, "rule_files": ["rules.yml"], "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        made = Prometheus(address)
        wait_until(lambda: _answers(made))
        yield made
    finally:
        process.terminate()
        process.wait(60)


def _answers(one: Prometheus) -> bool:
    try:
        return one.values("up") == [1.0]
    except OSError:
        return False


def asked() -> dict[str, list[str]]:
    """Return the Prometheus queries by panel or alert."""
    board = json.loads((HERE / "tandem.json").read_text())
    found = {
        panel["title"]: [one["expr"] for one in panel["targets"]]
        for panel in board["panels"]
        if panel["type"] != "row"
    }
    rules = yaml.safe_load((HERE / "rules.yaml").read_text())["spec"]["groups"][0]["rules"]
    return found | {rule["alert"]: [rule["expr"]] for rule in rules}


def told(client: Client, ids: list[int]) -> Finished:
    *_, end = client.generate(ids, max_tokens=60, ignore_eos=True)
    assert isinstance(end, Finished)
    return end


def load(address: str) -> list[Finished]:
    """Send load, some of it twice to get prefix hits."""
    with Client(address) as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        texts = [ids for seed in range(NUM_ROUNDS) for ids in prompts(NUM_CLIENTS, seed // 2)]
        return [*pool.map(lambda ids: told(client, ids), texts)]


def test_what_is_asked_for_is_there(tmp_path: Path) -> None:
    target = f"127.0.0.1:{free_port()}"
    with (
        ray_head(with_token=False, num_cpus=6) as head,
        serving(*SETS, f"server.http_address={target}", head=head) as server,
        prometheus(tmp_path, target) as it,
    ):
        ends = load(server.address)
        with Client(server.address, retry_s=0) as client, pytest.raises(InferenceError):
            client.complete("x", top_p=7.0)
        ends.append(moved(server.address, head))
        counts = {
            'tandem_request_success_total{finished_reason="length"}': len(ends),
            "tandem_generation_tokens_total": sum(end.usage.completion for end in ends),
            "tandem_prompt_tokens_total": sum(end.usage.prompt for end in ends),
            "tandem_prefix_cache_hits_total": sum(end.usage.cached for end in ends),
            'tandem_rejections_total{code="INVALID_ARGUMENT"}': 1,
            "sum(tandem_migrations_total)": 1,
            'tandem_gang_deaths_total{gang="decode-0"}': 1,
        }
        wait_until(lambda: {name: it.values(name) for name in counts} == _each(counts))
        wait_until(lambda: it.values("min(tandem_balance_ratio)") > [0.0])
        wait_until(lambda: not missing(it))
        states = it.get("rules")["groups"][0]["rules"]
        assert len(states) == 8 and {one["health"] for one in states} == {"ok"}


def _each(counts: dict[str, int]) -> dict[str, list[float]]:
    return {name: [float(num)] for name, num in counts.items()}


def missing(it: Prometheus) -> list[str]:
    """Return metrics without samples, and panels whose queries are empty. Ray's metrics are
    skipped."""
    names = {
        name
        for queries in asked().values()
        for query in queries
        for name in re.findall(r"\btandem_\w+", query)
    }
    assert len(names) > 30
    silent = [name for name in sorted(names) if not it.values(f"count({name})")]
    panels = [
        title
        for title, queries in asked().items()
        for query in queries
        if "ray_" not in query and not title.startswith("Tandem")
        if not it.values(query.replace("$__rate_interval", "1m").replace("[1h]", "[1m]"))
    ]
    return silent + panels


def moved(address: str, head: RayHead) -> Finished:
    """Return the end of an answer that outlives its rank."""
    with Client(address) as client:
        pieces = client.generate("def f(", max_tokens=600, ignore_eos=True)
        next(pieces)
        os.kill(actors(head.pid, "DecodeActor")[0], signal.SIGKILL)
        *_, end = pieces
    assert isinstance(end, Finished)
    return end
