"""Metrics computed from the records of runs. Pure functions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, quantiles

from tandem.cluster.bench import speculation
from tandem.cluster.bench.node_use import NodeUsage
from tandem.cluster.bench.runner import Record, Run
from tandem.core.answer import SpeculationCounts


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of a sample. Percentiles are interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """Return the distribution of ``values``; None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        percentiles = quantiles(
            ordered if len(ordered) > 1 else ordered * 2, n=100, method="inclusive"
        )
        return cls(fmean(ordered), percentiles[49], percentiles[89], percentiles[98])


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency bounds in milliseconds. None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met_by(self, record: Record) -> bool:
        """Return whether a request succeeded within the bounds.

        An answer of one token has no TPOT, so it meets any bound on TPOT.
        """
        pairs = ((ttft_ms(record), self.ttft_ms), (tpot_ms(record), self.tpot_ms))
        late = any(
            value is not None and bound is not None and value > bound for value, bound in pairs
        )
        return record.error is None and not late


@dataclass(frozen=True, slots=True)
class Metrics:
    """Results of several runs combined. Latencies are those of successful requests.

    Attributes:
        num_ok: Successful requests.
        num_sent: Requests that were sent.
        num_not_sent: Number of jobs that were not sent before the time was up.
        errors: Number of failed requests by gRPC code.
        duration_s: Sum of the runs' durations.
        requests_per_s: Successful requests per second.
        goodput_per_s: Requests per second that meet the SLO.
        itl_message_ms: Gaps between messages.
        itl_token_ms: Gaps between tokens: each message's gap divided by its number of tokens.
        e2e_ms: Time from the due time of a request to its end.
        lag_ms: Time from the due time of a request to its sending, over all requests. Latencies
            include it.
        step_ms: Estimated time of a decode step: mean gap between messages. The first gap of an
            answer is left out, because it contains the hand-over.
        use: Use of the decode nodes.
        host_share: Share of decode step time outside tensor programs.
    """

    num_ok: int
    num_sent: int
    num_not_sent: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    goodput_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    kv_bytes: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_message_ms: Distribution | None
    itl_token_ms: Distribution | None
    e2e_ms: Distribution | None
    lag_ms: Distribution | None
    step_ms: float | None
    use: NodeUsage
    host_share: float | None


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """Acceptance of drafts. Drafts cut off by a stop or by ``max_tokens`` do not count as accepted.

    Attributes:
        num_drafts: Largest draft depth that occurred.
        num_steps: Decode steps.
        accepted_length: Tokens per step.
        per_position: Accepted share of the drafts at each position.
        fitted: Acceptance probability that gives ``accepted_length`` if it is the same at all
            positions (cluster/bench/speculation.py).
        alpha: Accepted share of all drafts whose predecessors were accepted. Estimates E[sum min(p,
            q)], with the distributions p of the model and q of the drafter. This holds for
            rejection sampling, and if both are greedy.
        nodes_per_step: Drafts verified per step, including all branches of a tree.
        nodes_per_depth: Drafts verified per depth; 1 for chains.
    """

    num_drafts: int
    num_steps: int
    accepted_length: float | None
    per_position: tuple[float, ...]
    fitted: float | None
    alpha: float | None
    nodes_per_step: float | None
    nodes_per_depth: float

    @property
    def first(self) -> float | None:
        """Accepted share of the drafts at position 1; None without drafts."""
        return self.per_position[0] if self.per_position else None


def ttft_ms(record: Record) -> float | None:
    """Return the time from a request's due time to its first token in ms; None without a token."""
    return (record.messages[0][0] - record.due_s) * 1e3 if record.messages else None


def tpot_ms(record: Record) -> float | None:
    """Return the mean time per token after the first message in ms.

    Returns None if all tokens came in the first message.
    """
    num_later = sum(num for _, num in record.messages[1:])
    if not num_later:
        return None
    return (record.messages[-1][0] - record.messages[0][0]) / num_later * 1e3


def message_gaps_ms(record: Record) -> list[tuple[float, int]]:
    """Return a pair for each message except the first.

    A pair is the gap before the message in ms and the number of its tokens.
    """
    return [((b - a) * 1e3, num) for (a, _), (b, num) in pairwise(record.messages)]


def measure(runs: Sequence[Run], slo: Slo) -> Metrics:
    """Return the combined metrics of ``runs``, which ran one after another."""
    records = [record for run in runs for record in run.records]
    good = [record for record in records if record.error is None]
    finished = [record.finished for record in good if record.finished is not None]
    duration_s = sum(run.duration_s for run in runs)
    per_s = 1 / duration_s if duration_s else 0.0
    answers = [message_gaps_ms(record) for record in good]
    gaps = [gap for answer in answers for gap in answer]
    steps = Distribution.of(gap for answer in answers for gap, _ in answer[1:])
    num_prompt = sum(end.usage.prompt for end in finished)
    num_output = sum(end.usage.completion for end in finished)
    use = NodeUsage.total(run.use for run in runs)
    return Metrics(
        num_ok=len(good),
        num_sent=len(records),
        num_not_sent=sum(run.num_not_sent for run in runs),
        errors=dict(Counter(record.code for record in records if record.code is not None)),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        goodput_per_s=sum(map(slo.is_met_by, good)) * per_s,
        input_tokens_per_s=num_prompt * per_s,
        output_tokens_per_s=num_output * per_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(end.usage.cached for end in finished),
        num_output_tokens=num_output,
        kv_bytes=sum(end.kv_transfer.bytes for end in finished),
        ttft_ms=Distribution.of(x for x in map(ttft_ms, good) if x is not None),
        tpot_ms=Distribution.of(x for x in map(tpot_ms, good) if x is not None),
        itl_message_ms=Distribution.of(gap for gap, _ in gaps),
        itl_token_ms=Distribution.of(gap / num for gap, num in gaps for _ in range(num)),
        e2e_ms=Distribution.of((r.end_s - r.due_s) * 1e3 for r in good),
        lag_ms=Distribution.of((r.sent_s - r.due_s) * 1e3 for r in records),
        step_ms=None if steps is None else steps.mean,
        use=use,
        host_share=use.host_share,
    )


def _num_reachable_drafts(counts: SpeculationCounts) -> int:
    """Return the number of drafts whose predecessors in the same step were all accepted."""
    drafted = counts.drafted_per_position
    before = [*drafted[:1], *counts.accepted_per_position]
    return sum(map(min, drafted, before))


def acceptance(records: Iterable[Record]) -> AcceptanceStats:
    """Return the acceptance over all successful requests."""
    good = [r.finished for r in records if r.finished is not None and r.error is None]
    drafted = Counter[int]()
    accepted = Counter[int]()
    for counts in (end.speculation for end in good):
        drafted.update({i: num for i, num in enumerate(counts.drafted_per_position) if num})
        accepted.update(dict(enumerate(counts.accepted_per_position)))
    num_steps = sum(end.speculation.num_steps for end in good)
    num_nodes = sum(end.speculation.num_nodes for end in good)
    num_later = sum(end.usage.completion - 1 for end in good)
    length = num_later / num_steps if num_steps else None
    num_tried = sum(map(_num_reachable_drafts, (end.speculation for end in good)))
    return AcceptanceStats(
        num_drafts=len(drafted),
        num_steps=num_steps,
        accepted_length=length,
        per_position=tuple(accepted[i] / drafted[i] for i in sorted(drafted)),
        fitted=None if length is None else speculation.fitted_acceptance(length, len(drafted)),
        alpha=accepted.total() / num_tried if num_tried else None,
        nodes_per_step=num_nodes / num_steps if num_steps else None,
        nodes_per_depth=num_nodes / drafted.total() if num_nodes else 1.0,
    )
