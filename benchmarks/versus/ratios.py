"""Tandem's figures by those of a peer's fastest arm at the same load."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.versus.arms import OFFLINE, PEERS, SERVED, SPLIT, VLLM
from benchmarks.versus.results import Result

AGREEMENT = 0.03
"""Speculative figures count only if mean accepted lengths differ by no more than this."""
TPOT, PREFILL, TTFT = "tpot_ms", "prefill_ms", "ttft_ms"
PEER_SETTINGS = {OFFLINE: (OFFLINE,), SERVED: (OFFLINE, SERVED), SPLIT: (SPLIT,)}
"""An arm behind a server is held against the peer's engine alone as well: the harder one."""


@dataclass(frozen=True)
class Ratio:
    """``same_n`` is against the peer's arms with as many drafts, ``best`` against those of any
    number; ``agrees`` is None where no drafts are made."""

    result: Result
    measure: str
    same_n: float | None
    same_n_peer: str | None
    best: float | None
    best_peer: str | None
    agrees: bool | None


def fastest(results: Iterable[Result], measure: str) -> Result | None:
    """The one with the least median; those that failed or have none are left out."""
    measured = [(result.median(measure), result) for result in results if result.error is None]
    known = [(value, result) for value, result in measured if value is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def peers_of(result: Result, results: Iterable[Result], family: str) -> list[Result]:
    """That family's arms at the same load on the same checkpoint in settings it is held against."""
    return [
        other
        for other in results
        if other.family == family
        and other.setting in PEER_SETTINGS[result.setting]
        and (other.checkpoint, other.load, other.dtype)
        == (result.checkpoint, result.load, result.dtype)
    ]


def agree(ours: float | None, theirs: float | None) -> bool:
    """Whether two mean accepted lengths differ by at most AGREEMENT of theirs."""
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
    """Of every arm that is no peer's and did not fail, in the order of the results."""
    ours = [r for r in results if r.family not in PEERS and r.error is None]
    found = [ratio(result, results, measure, family) for result in ours]
    return [one for one in found if one.result.median(measure) is not None]
