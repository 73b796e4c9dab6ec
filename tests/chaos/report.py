"""Compare every answer with its reference, and report the figures of a run."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.harness.exact import near_ties
from benchmarks.soak.check import is_plain, score_ties, to_request
from benchmarks.soak.load import Answer
from benchmarks.soak.plans import Plan
from tandem.core.config import TINY_MODEL
from tests.chaos.asker import Asked, is_turned_away

PATIENCE_S = 60.0
"""Time for which a client with default settings retries."""


@dataclass
class Report:
    """Figures of one run.

    Attributes:
        num_exact: Answers of which transformers chooses each token.
        excused: Requests refused while no pair of ranks existed for longer than a client retries.
        turned_away: Requests that found a gateway full before their first token. A request that has
            a token may not be refused for that reason.
        gap_parts: Composition of the longest gaps (gaps.py).
        ties: Places at which the best two tokens differ by less than 1e-4 in float64.
        away: Times without a pair of ranks, as (start, end).
        short: Times in which some rank was missing, as (start, end).
        poison: Outcomes of poison requests, which must be refused with INTERNAL.
    """

    faults: dict[str, int]
    messages: dict[str, int]
    num_requests: int = 0
    num_exact: int = 0
    refused: list[str] = field(default_factory=list)
    excused: int = 0
    turned_away: int = 0
    gap_parts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    away: list[tuple[float, float]] = field(default_factory=list)
    short: list[tuple[float, float]] = field(default_factory=list)
    poison: Counter[str] = field(default_factory=Counter)
    longest_answer_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    end: dict[str, Any] = field(default_factory=dict)
    full_size_after_s: float | None = None
    num_left: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    is_more_good: bool = True

    @property
    def is_good(self) -> bool:
        whole = self.full_size_after_s is not None and self.end.get("nothing_left", False)
        lost = self.wrong or self.refused or self.num_left or self.poison.keys() - {"INTERNAL"}
        return whole and not lost and self.is_more_good

    def table(self) -> dict[str, Any]:
        gaps = sorted(self.gaps_s) or [0.0]
        short = sorted(b - a for a, b in self.short) or [0.0]
        return {
            "node faults": sum(self.faults.values()),
            "faults": self.faults,
            "message faults": self.messages,
            "requests": self.num_requests,
            "exact": self.num_exact,
            "near ties": len(self.ties),
            "refused": len(self.refused),
            f"without a pair for {PATIENCE_S:.0f} s": self.excused,
            "turned away by a full gateway": self.turned_away,
            "why": self.refused[:5],
            "wrong": len(self.wrong),
            "what": self.wrong[:5],
            "tokens": self.num_tokens,
            "longest without a pair": f"{max((b - a for a, b in self.away), default=0.0):.1f} s",
            "not in full size": f"{len(short)} times, p50 {statistics.median(short):.1f} s, "
            f"most {short[-1]:.1f} s",
            "longest answer": f"{self.longest_answer_s:.1f} s",
            "gap in a stream": f"p50 {statistics.median(gaps):.2f} s, p99 "
            f"{gaps[int(0.99 * (len(gaps) - 1))]:.2f} s, most {gaps[-1]:.2f} s",
            "the longest tenth of gaps": self.gap_parts,
            "full size after": f"{self.full_size_after_s} s",
            "poison": dict(self.poison),
            "left behind": self.num_left,
            "at the end": self.end,
            **self.more,
        }


def take(
    report: Report,
    asked: list[Asked],
    told: Iterable[dict[str, Any]],
    on_checked: Callable[[], None],
) -> None:
    """Count the answers, and compare each distinct one once."""
    answers = Counter[tuple[int, tuple[int, ...]]]()
    for one in told:
        report.num_requests += 1
        report.num_tokens += len(one["tokens"])
        report.longest_answer_s = max(report.longest_answer_s, one["took_s"])
        report.gaps_s.append(one["gap_s"])
        report.turned_away += is_turned_away(one)
        if one["refused"] and not is_turned_away(one):
            times = one["began_at"], one["began_at"] + one["took_s"]
            is_excused = any(
                b - a >= PATIENCE_S and times[0] < b and a < times[1] for a, b in report.away
            )
            report.excused += is_excused
            if not is_excused:
                report.refused.append(f"at {times[0]:.1f}: {one['refused']}")
        answers[one["number"], tuple(one["tokens"])] += not one["refused"]
    for (number, tokens), num in answers.items():
        try:
            report.ties += compared(asked[number], list(tokens), is_whole=num > 0)
            report.num_exact += num
        except AssertionError as error:
            report.wrong.append(f"request {number}, {max(1, num)} times: {error}")
        on_checked()


def compared(asked: Asked, tokens: list[int], is_whole: bool) -> list[str]:
    """Return near ties. Raises AssertionError where the tokens differ from the reference."""
    options = asked.options
    if is_whole:
        assert len(tokens) == options["max_tokens"], f"{len(tokens)} tokens"
    if not tokens:
        return []
    if is_plain(options):
        return near_ties(TINY_MODEL, asked.ids, tokens)
    answer = Answer(Plan("chaos", asked.ids, options, "", 0.0), 0)
    return score_ties(to_request(answer), tokens, frozenset())


def spans(states: list[dict[str, Any]], until: float, well: set[str]) -> list[tuple[float, float]]:
    """Return the times, as (start, end), in which none of the states ``well`` was reported."""
    found: list[tuple[float, float]] = []
    for one, later in pairwise([*states, {"at": until, "state": ""}]):
        if one["state"] not in well:
            begins = found.pop()[0] if found and found[-1][1] == one["at"] else one["at"]
            found.append((begins, later["at"]))
    return found
