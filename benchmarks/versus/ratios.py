"""Tandem's figures divided by those of a peer's fastest arm at the same load."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.versus.arms import OFFLINE, PEERS, SERVED, SPLIT, VLLM
from benchmarks.versus.results import Result

AGREEMENT = 0.03
"""Maximum relative difference of mean accepted lengths at which speculative figures count."""
TPOT, PREFILL, TTFT = "tpot_ms", "prefill_ms", "ttft_ms"
PEER_SETTINGS = {OFFLINE: (OFFLINE,), SERVED: (OFFLINE, SERVED), SPLIT: (SPLIT,)}
"""Settings of a peer that an arm is compared with. A served arm is also compared with the peer's
bare engine, which is harder to match."""


@dataclass(frozen=True)
class Ratio:
    """Ratios of one result to a peer.

    ``same_n`` compares with the peer's arms of the same number of drafts, ``best`` with those of
    any number. ``agrees`` is None without drafts.
    """

    result: Result
    measure: str
    same_n: float | None
    same_n_peer: str | None
    best: float | None
    best_peer: str | None
    agrees: bool | None


def fastest(results: Iterable[Result], measure: str) -> Result | None:
    """Return the result with the minimum median, leaving out those that failed or have none."""
    measured = [(result.median(measure), result) for result in results if result.error is None]
    known = [(value, result) for value, result in measured if value is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def peers_of(result: Result, results: Iterable[Result], family: str) -> list[Result]:
    """Return that family's results on the same checkpoint and load, in comparable settings."""
    return [
        other
        for other in results
        if other.family == family
        and other.setting in PEER_SETTINGS[result.setting]
        and (other.checkpoint, other.load, other.dtype)
        == (result.checkpoint, result.load, result.dtype)
    ]


def agree(ours: float | None, theirs: float | None) -> bool:
    """Return whether two mean accepted lengths differ by at most AGREEMENT of theirs."""
    if ours is None or theirs is None:
        return False
    return abs(ours - theirs) <= AGREEMENT * theirs


def divided(result: Result, peer: Result | None, measure: str) -> float | None:
    ours = result.median(measure)
    theirs = None if peer is None else peer.median(measure)
    return None if ours is None or not theirs else ours / theirs


def ratio(result: Result, results: Sequence[Result], measure: str, family: str = VLLM) -> Ratio:
    peers = peers_of(result, results, family)
    same = fastest([peer for peer in peers if peer.num_drafts == result.num_drafts], measure)
    best = fastest(peers, measure)
    agrees = None
    if result.num_drafts and same is not None:
        agrees = agree(result.accepted_length, same.accepted_length)
    return Ratio(
        result,
        measure,
        divided(result, same, measure),
        None if same is None else same.arm,
        divided(result, best, measure),
        None if best is None else best.arm,
        agrees,
    )


def all_ratios(results: Sequence[Result], measure: str, family: str = VLLM) -> list[Ratio]:
    """Return the ratios of every arm that is no peer's and did not fail, in the results' order."""
    ours = [r for r in results if r.family not in PEERS and r.error is None]
    found = [ratio(result, results, measure, family) for result in ours]
    return [one for one in found if one.result.median(measure) is not None]
