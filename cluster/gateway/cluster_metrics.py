"""Prometheus metrics of the cluster, from membership and heartbeats.

No rank is called to collect them. Every gateway exports the same metrics of a rank, so dashboards
should aggregate them with ``max by (rank)``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.cluster.gateway.admission import Admission
from tandem.cluster.gateway.balance import balance_ratios
from tandem.cluster.gateway.fleet import Fleet
from tandem.core.heartbeat import Heartbeat

RANK_LABELS = ("rank", "kind")
GANG_LABELS = ("gang", "kind")
_GAUGES: dict[str, tuple[str, Callable[[Heartbeat], float]]] = {
    "rank_rows": (
        "Sequences that a rank computes in its steps.",
        lambda heartbeat: heartbeat.load.num_active_rows,
    ),
    "rank_waiting": (
        "Sequences that wait on a rank for a free batch row.",
        lambda heartbeat: heartbeat.num_waiting,
    ),
    "rank_prompt_tokens": (
        "Prompt tokens that a rank has yet to compute.",
        lambda heartbeat: heartbeat.num_tokens_left,
    ),
    "rank_leases": (
        "Open KV hand-overs: offers of a prefill rank, pulls of a decode rank.",
        lambda heartbeat: heartbeat.load.num_open_leases,
    ),
    "rank_channels": (
        "Open KV transfer channels to other ranks.",
        lambda heartbeat: heartbeat.load.num_channels,
    ),
    "rank_quarantined": (
        "Staging buffers of failed transfers, not reusable yet.",
        lambda heartbeat: heartbeat.load.num_quarantined,
    ),
}
_COUNTERS = {
    "rank_steps": ("Steps that a rank has run in this epoch.", "num_steps"),
    "rank_step_seconds": (
        "Total duration of the steps of a rank in this epoch, in seconds.",
        "step_s",
    ),
    "rank_program_seconds": (
        "Part of the step duration spent in tensor programs, in seconds.",
        "program_s",
    ),
    "rank_draftless_steps": (
        "Steps without drafts because the drafter failed.",
        "num_draftless_steps",
    ),
    "rank_refused_programs": (
        "Step programs that run eagerly because recording or capturing failed.",
        "num_refused_programs",
    ),
    "num_preemptions": ("Sequences that were preempted.", "num_preempted"),
    "num_non_finite": ("Sequences whose logits were not finite numbers.", "num_non_finite"),
}
"""Metric name to help text and the name of the counter in heartbeats."""
_Sample = tuple[Sequence[str], float]


def collect_cluster_metrics(admission: Admission) -> Iterator[Metric]:
    """Yield the metrics of the cluster as this gateway knows it."""
    yield gauge(
        name="serving",
        text="1 while the server accepts requests.",
        labels=(),
        samples=[((), admission.is_serving())],
    )
    if (gateway := admission.gateway) is None:
        return
    num_running = sum(streams.num_with_tokens for streams in gateway.open_answers)
    num_waiting = sum(map(len, gateway.open_answers)) - num_running
    yield gauge(
        name="num_requests_running",
        text="Unfinished answers that have at least one token.",
        labels=(),
        samples=[((), num_running)],
    )
    yield gauge(
        name="num_requests_waiting",
        text="Answers that wait for their first token.",
        labels=(),
        samples=[((), num_waiting)],
    )
    migrations = [([reason], num) for reason, num in gateway.migrations.items()]
    yield counter(
        name="migrations",
        text="Attempts after which the answer migrated to other ranks.",
        labels=["reason"],
        samples=migrations,
    )
    yield from gang_metrics(gateway.fleet)
    yield from rank_metrics(gateway.fleet)


def rank_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Yield load, cache use, availability and balance of each rank."""
    ranks = [((r.info.spec.label, r.info.spec.kind), r) for r in fleet.ranks.values()]
    heartbeats = [(names, rank.heartbeat) for names, rank in ranks if rank.heartbeat is not None]
    for name, (text, read) in _GAUGES.items():
        yield gauge(
            name=name,
            text=text,
            labels=RANK_LABELS,
            samples=[(names, read(heartbeat)) for names, heartbeat in heartbeats],
        )
    for name, (text, key) in _COUNTERS.items():
        counters = [(names, heartbeat.load.counters) for names, heartbeat in heartbeats]
        yield counter(
            name=name,
            text=text,
            labels=RANK_LABELS,
            samples=[(names, values[key]) for names, values in counters if key in values],
        )
    used = [(names, 1 - r.load.num_free_tokens / r.info.max_tokens) for names, r in ranks]
    yield gauge(
        name="kv_cache_usage_perc",
        text="Share of a rank's KV cache that sequences hold, 0 to 1.",
        labels=RANK_LABELS,
        samples=used,
    )
    up = [(names, float(rank.liveness.is_well)) for names, rank in ranks]
    yield gauge(
        name="rank_up",
        text="1 while requests are routed to a rank.",
        labels=RANK_LABELS,
        samples=up,
    )
    ratios = balance_ratios(fleet.ranks.values())
    gangs = [(names, rank.info.spec.gang) for names, rank in ranks]
    balances = [(names, ratios[gang]) for names, gang in gangs if gang in ratios]
    info = [((*names, rank.info.kernels), 1.0) for names, rank in ranks]
    yield gauge(
        name="rank_info",
        text="Always 1; the label kernels names the kernels that a rank uses.",
        labels=(*RANK_LABELS, "kernels"),
        samples=info,
    )
    yield gauge(
        name="balance_ratio",
        text="Expert load of a gang: mean rows per rank divided by the maximum.",
        labels=RANK_LABELS,
        samples=balances,
    )


def gang_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Yield the state and the number of ended epochs of each gang."""
    states = [((gang.name, gang.kind, gang.state), 1.0) for gang in fleet.membership.gangs]
    yield gauge(
        name="gang_state",
        text="Always 1; the label state names the current state of a gang.",
        labels=(*GANG_LABELS, "state"),
        samples=states,
    )
    failures = [((gang.name, gang.kind), gang.num_deaths) for gang in fleet.membership.gangs]
    yield counter(
        name="gang_deaths",
        text="Epochs of a gang that ended.",
        labels=GANG_LABELS,
        samples=failures,
    )


def gauge(name: str, text: str, labels: Sequence[str], samples: Iterable[_Sample]) -> Metric:
    """Return the gauge ``tandem_<name>`` with help ``text``."""
    return _add_samples(GaugeMetricFamily(f"tandem_{name}", text, labels=labels), samples)


def counter(name: str, text: str, labels: Sequence[str], samples: Iterable[_Sample]) -> Metric:
    """Return the counter ``tandem_<name>`` with help ``text``."""
    return _add_samples(CounterMetricFamily(f"tandem_{name}", text, labels=labels), samples)


def _add_samples(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[_Sample]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
