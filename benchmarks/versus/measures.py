"""Measures computed from the tokens of one batch and their times."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.versus.job import Event

STEADY_SHARE = 0.75
"""Steady decode ends when the share of sequences still being generated falls below this."""
NGRAM = 8


@dataclass(frozen=True)
class Measures:
    """Measures of one batch.

    Attributes:
        prefill_ms: Time until every sequence has its first token; None with arrival times.
        tpot_ms: Time per token in the steady part. None if no sequence had a second token there, or
            with arrival times, which leave no steady part.
        itl_p50_ms: Median time between two pieces of an answer. Covers the steady part if all were
            sent at once, else everything.
        itl_p99_ms: 99th percentile of the same times.
        requests: TTFT and p99 of ITL of each request in ms, in the order sent.
        span_s: Time from the first request sent to the last token.
    """

    ttft_ms: float
    prefill_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float
    accepted_length: float | None
    repeated_ngrams: float
    num_tokens: int
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    requests: list[tuple[float, float]]
    span_s: float


def measure(events: Sequence[Event], arrivals_s: Sequence[float]) -> Measures:
    """Compute the measures. Raises ValueError if a sequence has no token at all."""
    of, num_sequences = by_sequence(events), len(arrivals_s)
    if missing := sorted(set(range(num_sequences)) - set(of)):
        raise ValueError(f"sequences {missing} of {num_sequences} have no token")
    firsts = [of[i][0].at_s - arrival for i, arrival in enumerate(arrivals_s)]
    arrived = any(arrivals_s)
    window = (0.0, math.inf) if arrived else steady_window(list(of.values()))
    gaps = [gap for own in of.values() for gap in itl_s(own, *window)]
    own_p99 = [quantile(list(itl_s(of[i])), 0.99) or 0.0 for i in range(num_sequences)]
    num_tokens = sum(len(event.token_ids) for event in events)
    answers = [[t for event in own for t in event.token_ids] for own in of.values()]
    return Measures(
        ttft_ms=1e3 * statistics.fmean(firsts),
        prefill_ms=None if arrived else 1e3 * max(firsts),
        tpot_ms=None if arrived else _ms(steady_tpot_s(list(of.values()))),
        tokens_per_s=num_tokens / max(event.at_s for event in events),
        accepted_length=accepted_length(of.values()),
        repeated_ngrams=repeated_ngrams(answers),
        num_tokens=num_tokens,
        itl_p50_ms=_ms(quantile(gaps, 0.5)),
        itl_p99_ms=_ms(quantile(gaps, 0.99)),
        requests=[(1e3 * a, 1e3 * b) for a, b in zip(firsts, own_p99, strict=True)],
        span_s=max(event.at_s for event in events) - min(arrivals_s),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def by_sequence(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.sequence].append(event)
    return dict(found)


def itl_s(own: Sequence[Event], begins: float = 0.0, until: float = math.inf) -> Iterator[float]:
    """Yield the seconds between pieces of one answer that came in a span of time."""
    inside = [event.at_s for event in own if begins <= event.at_s <= until]
    return (later - earlier for earlier, later in pairwise(inside))


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that ``share`` of the values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def steady_window(sequences: Sequence[Sequence[Event]]) -> tuple[float, float]:
    """Return the time from all first tokens until fewer than STEADY_SHARE of the sequences
    continue."""
    begins = max(own[0].at_s for own in sequences)
    ends = sorted(own[-1].at_s for own in sequences)
    num_kept = math.ceil(STEADY_SHARE * len(sequences))
    until = ends[len(sequences) - num_kept]
    return begins, until if until > begins else ends[-1]


def steady_tpot_s(sequences: Sequence[Sequence[Event]]) -> float | None:
    """Return the seconds per token and sequence in the steady part."""
    begins, until = steady_window(sequences)
    seconds, num_tokens = 0.0, 0
    for own in sequences:
        seconds += max(0.0, min(own[-1].at_s, until) - begins)
        num_tokens += sum(len(e.token_ids) for e in own if begins < e.at_s <= until)
    return seconds / num_tokens if num_tokens else None


def accepted_length(sequences: Iterable[Sequence[Event]]) -> float | None:
    """Return the tokens per step and sequence after the first token, including the model's own."""
    later = [event for own in sequences for event in own[1:]]
    return sum(len(event.token_ids) for event in later) / len(later) if later else None


def repeated_ngrams(answers: Iterable[Sequence[int]], size: int = NGRAM) -> float:
    """Return the share of n-grams that occurred earlier in the same answer; 0 if there are none."""
    num_all = num_repeated = 0
    for ids in answers:
        seen: set[tuple[int, ...]] = set()
        for i in range(len(ids) - size + 1):
            ngram = tuple(ids[i : i + size])
            num_all += 1
            num_repeated += ngram in seen
            seen.add(ngram)
    return num_repeated / num_all if num_all else 0.0
