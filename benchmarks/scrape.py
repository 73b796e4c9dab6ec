"""What being watched costs: a scrape of a cluster of many ranks, and tokens while it is scraped.

    python -m benchmarks.scrape [--ranks 64] [--turns 10]

The first is the text of /metrics over made-up ranks that have all counters; the second the time per
token of answers of a real server, a scrape every second and none, in turns.
"""

import argparse
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from tqdm import tqdm

from benchmarks.driven.held_out import held_out
from benchmarks.driven.procs import free_port, serving
from tandem import Client
from tandem.cluster.gateway.cluster_metrics import of_gangs, of_ranks
from tandem.cluster.gateway.metrics import RequestMetrics
from tandem.core.beat import Beat, Held
from tandem.core.membership import Gang
from tandem.core.pace import Pace

COUNTERS = (
    *("num_steps", "step_s", "program_s", "num_preempted"),
    *("num_draftless_steps", "num_refused_programs"),
)
NUM_SCRAPES, WARM_UP, NUM_LAYERS = 200, 20, 58
NUM_CLIENTS, NUM_TOKENS = 8, 400


class MadeUp(Collector):
    """A cluster of so many ranks, each a gang of its own."""

    def __init__(self, num_ranks: int) -> None:
        names = [f"decode-{i}.0" for i in range(num_ranks)]
        held = Held(
            num_active_rows=16,
            counters=dict.fromkeys(COUNTERS, 1234.5),
            rows_by_layer=(1000,) * NUM_LAYERS,
        )
        rank: dict[str, Any] = {
            "beat": Beat(Pace(1, 0.0, 1.0), held),
            "load": SimpleNamespace(num_free_tokens=1000),
            "liveness": SimpleNamespace(is_well=True),
        }
        infos = [
            SimpleNamespace(
                max_tokens=4096,
                spec=SimpleNamespace(label=name, kind="decode", gang=name),
                kernels="native, recorded",
            )
            for name in names
        ]
        gangs = [Gang(name, "decode", 1, state="ready") for name in names]
        self.fleet: Any = SimpleNamespace(
            ranks={info.spec.label: SimpleNamespace(info=info, **rank) for info in infos},
            applied=SimpleNamespace(gangs=gangs),
        )
        self.requests = RequestMetrics()

    def collect(self) -> Iterator[Metric]:
        yield from self.requests.registry.collect()
        yield from of_gangs(self.fleet)
        yield from of_ranks(self.fleet)


def scrape_ms(num_ranks: int) -> tuple[float, int]:
    """The median, and the bytes of the text."""
    registry = CollectorRegistry()
    registry.register(MadeUp(num_ranks))
    times, text = [], b""
    for _ in range(NUM_SCRAPES):
        began_at = time.perf_counter()
        text = generate_latest(registry)
        times.append(1e3 * (time.perf_counter() - began_at))
    return statistics.median(times[WARM_UP:]), len(text)


@contextmanager
def scraping(address: str) -> Iterator[None]:
    """Once a second meanwhile."""
    over = threading.Event()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def scrape() -> None:
        while not over.wait(1.0):
            with opener.open(f"http://{address}/metrics", timeout=60) as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def turn_s(client: Client, texts: list[list[int]]) -> float:
    """Seconds per token of answers to these prompts, all at once."""
    began_at = time.perf_counter()
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in pool.map(
            lambda ids: client.complete(ids, max_tokens=NUM_TOKENS, ignore_eos=True), texts
        ):
            pass
    return (time.perf_counter() - began_at) / (NUM_TOKENS * len(texts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64, help="made-up ones [64]")
    parser.add_argument("--turns", type=int, default=10, help="pairs, with and without [10]")
    args = parser.parse_args()
    median_ms, size = scrape_ms(args.ranks)
    print(f"a scrape of {args.ranks} ranks: {median_ms:.1f} ms, {size:,} bytes")
    address = f"127.0.0.1:{free_port()}"
    texts = held_out(NUM_CLIENTS, 60, 90, seed=5)
    with (
        serving(f"server.http_address={address}", "decode.max_rows=8") as server,
        Client(server.address) as client,
    ):
        turn_s(client, texts)
        ratios = []
        for i in tqdm(range(args.turns), unit="pair"):
            if i % 2:
                without = turn_s(client, texts)
            with scraping(address):
                beside = turn_s(client, texts)
            if not i % 2:
                without = turn_s(client, texts)
            ratios.append(beside / without)
    print(
        f"time per token with a scrape a second, by that without: {statistics.median(ratios):.3f} "
        f"(of {args.turns} pairs {min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
