"""The regime model: times of parts of a step as linear functions of rows and context."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.draft_length import PAGE_SIZE
from cluster.bench.speculation import expected_length

VERIFY, MTP_DRAFT, SELF_DRAFT, REST = "verify", "mtp", "self", "rest"


@dataclass(frozen=True)
class Times:
    """A ``part`` of ``num`` drafts took so long with so many rows that read so many tokens each."""

    part: str
    num_rows: int
    context: int
    num: int
    seconds: float


def terms(one: Times) -> list[float]:
    """What its time is linear in: what is read once, work of each token, entries that are read for
    each row, and work of each token with each entry."""
    rows, num = one.num_rows, one.num
    entries = rows * one.context
    if one.part == VERIFY:
        tokens = rows * (num + 1)
        return [1, tokens, entries, tokens * one.context]
    return [1, rows, 0, 0] if one.part == REST else [1, num, num * rows, num * entries]


@dataclass(frozen=True)
class Model:
    """Weights of the terms of each part."""

    weights: dict[str, list[float]]

    def seconds(self, part: str, num_rows: int, context: int, num: int) -> float:
        found = terms(Times(part, num_rows, context, num, 0.0))
        return sum(a * b for a, b in zip(found, self.weights[part], strict=True))

    def ratio(self, drafter: str, num_rows: int, context: int, num: int, alpha: float) -> float:
        """Of a token with ``num`` drafts by one without."""
        name, _, budget = drafter.partition(" ")
        read = min(context, int(budget) * PAGE_SIZE) if budget else context
        rest = self.seconds(REST, num_rows, context, 0)
        plain = self.seconds(VERIFY, num_rows, context, 0) + rest
        drafts = self.seconds(name, num_rows, read, num)
        step = self.seconds(VERIFY, num_rows, context, num) + drafts + rest
        return step / expected_length(alpha, num) / plain


def fitted(times: Sequence[Times]) -> Model:
    """Least squares of relative errors, part by part."""
    weights = {}
    for part in dict.fromkeys(one.part for one in times):
        mine = [one for one in times if one.part == part]
        a = torch.tensor([terms(one) for one in mine], dtype=torch.float64)
        seconds = torch.tensor([one.seconds for one in mine], dtype=torch.float64)
        scaled = a / seconds.unsqueeze(1)
        scale = scaled.abs().amax(0).clamp(min=1e-300)
        found = torch.linalg.lstsq(
            scaled / scale, torch.ones(len(mine), 1, dtype=torch.float64), driver="gelsd"
        ).solution
        weights[part] = (found.squeeze(1) / scale).tolist()
    return Model(weights)
