"""The regime model: times of steps as linear functions of rows and context."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.cluster.bench.speculation import expected_length

VERIFY, NONE = "verify", "none"


@dataclass(frozen=True)
class Times:
    """Measured time of a step with ``num`` drafts.

    The step has ``num_rows`` rows of ``context`` tokens. Drafting reads ``num_read`` of these
    tokens.
    """

    drafter: str
    num_rows: int
    context: int
    num_read: int
    num: int
    seconds: float


@dataclass(frozen=True)
class Cell:
    """Time of a token with one drafter, n and context, divided by that without drafts.

    Attributes:
        alpha: Share of drafts accepted among those that follow accepted ones.
        predicted: Time ratio by the model.
        measured: Measured time ratio.
    """

    context: int
    drafter: str
    num_drafts: int
    alpha: float
    predicted: float
    measured: float


def verify_terms(num_rows: int, context: int, num: int) -> list[float]:
    """Return the terms of the linear model of T_V.

    The terms are data read once, work per token, entries read per row, and work per (token, entry).
    """
    tokens = num_rows * (num + 1)
    return [1, tokens, num_rows * context, tokens * context]


def draft_terms(num_rows: int, num_read: int, num: int) -> list[float]:
    """Return the terms of the linear model of ``num`` drafting passes. The first term is
    constant."""
    return [1, num, num * num_rows, num * num_rows * num_read]


def product(weights: Sequence[float], terms: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(weights, terms, strict=True))


@dataclass(frozen=True)
class Model:
    """Weights of the terms of T_V, and of each drafter's T_D. T_T is T_V without drafts."""

    weights: dict[str, list[float]]

    def verify_s(self, num_rows: int, context: int, num: int) -> float:
        return product(self.weights[VERIFY], verify_terms(num_rows, context, num))

    def draft_s(self, drafter: str, num_rows: int, num_read: int, num: int) -> float:
        """Return the time of making all ``num`` drafts; 0 for the drafter by which T_V was
        fitted."""
        weights = self.weights.get(drafter.split()[0], [0.0] * 4)
        return product(weights, draft_terms(num_rows, num_read, num))

    def ratio(
        self, drafter: str, num_rows: int, context: int, num_read: int, num: int, alpha: float
    ) -> float:
        """Return the time of a token with ``num`` drafts, divided by that of one without."""
        step_s = self.verify_s(num_rows, context, num)
        step_s += self.draft_s(drafter, num_rows, num_read, num)
        return step_s / expected_length(alpha, num) / self.verify_s(num_rows, context, 0)


def fitted(free: str, times: Sequence[Times]) -> Model:
    """Fit the model by least squares of errors relative to step times.

    T_V is fitted to steps without drafts and to those of ``free``, whose drafts cost almost
    nothing. The additional time of other drafters is T_D.
    """
    own = [one for one in times if one.drafter in (free, NONE)]
    verify = solved(
        [verify_terms(one.num_rows, one.context, one.num) for one in own],
        [one.seconds for one in own],
        [one.seconds for one in own],
    )
    weights = {VERIFY: verify}
    beside = {(one.num_rows, one.context, one.num): one.seconds for one in own}
    for name in dict.fromkeys(one.drafter.split()[0] for one in times if one not in own):
        mine = [one for one in times if one.drafter.split()[0] == name]
        weights[name] = solved(
            [draft_terms(one.num_rows, one.num_read, one.num) for one in mine],
            [one.seconds - beside[one.num_rows, one.context, one.num] for one in mine],
            [one.seconds for one in mine],
        )
    return Model(weights)


def solved(
    terms: Sequence[Sequence[float]], values: Sequence[float], whole: Sequence[float]
) -> list[float]:
    """Return weights by which the terms give the values, with least squares of errors over
    ``whole``."""
    whole_K = torch.tensor(whole, dtype=torch.float64)
    terms_KJ = torch.tensor(terms, dtype=torch.float64) / whole_K.unsqueeze(1)
    scale_J = terms_KJ.abs().amax(0).clamp(min=1e-300)
    values_K1 = (torch.tensor(values, dtype=torch.float64) / whole_K).unsqueeze(1)
    found = torch.linalg.lstsq(terms_KJ / scale_J, values_K1, driver="gelsd").solution
    return (found.squeeze(1) / scale_J).tolist()
