"""Generate docs/reference/metrics.md from the metrics that a gateway exports."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from tandem.cluster.gateway.cluster_metrics import collect_cluster_metrics
from tandem.cluster.gateway.metrics import RequestMetrics
from tests.reference.values import prose, table

_Described = tuple[str, str, tuple[str, ...], str]
"""Name in the exposition, type, labels and help text."""


def describe_metrics() -> str:
    """Return a table for requests, one for ranks and one for gangs."""
    groups: dict[str, list[_Described]] = {"Requests": [], "Ranks": [], "Gangs": []}
    for metric in [*_request_metrics(), *_cluster_metrics()]:
        labels = metric[2]
        title = "Ranks" if "rank" in labels else "Gangs" if "gang" in labels else "Requests"
        groups[title].append(metric)
    parts = []
    for title, metrics in groups.items():
        rows = [(_spell(name, labels), kind, prose(text)) for name, kind, labels, text in metrics]
        parts += [f"## {title}", table(("metric", "type", "meaning"), rows)]
    return "\n\n".join(parts)


def _spell(name: str, labels: Sequence[str]) -> str:
    return f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"


def _request_metrics() -> Iterator[_Described]:
    registry = RequestMetrics().registry
    for collector in registry._collector_to_names:
        yield from _describe(collector.collect(), getattr(collector, "_labelnames", ()))


def _cluster_metrics() -> Iterator[_Described]:
    """Yield the metrics of a cluster without ranks and gangs, which has no samples."""
    membership = SimpleNamespace(gangs=[])
    fleet = SimpleNamespace(ranks={}, membership=membership)
    gateway = SimpleNamespace(open_answers=[], migrations={}, fleet=fleet)
    admission: Any = SimpleNamespace(is_serving=lambda: False, gateway=gateway)
    for family in collect_cluster_metrics(admission):
        yield from _describe([family], family._labelnames)  # type: ignore[attr-defined]


def _describe(families: Any, labels: Sequence[str]) -> Iterator[_Described]:
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, tuple(labels), family.documentation
