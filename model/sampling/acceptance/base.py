"""The acceptance seam: what verification knows, and what a kind of acceptance makes of it.

Shape legend: B rows, N drafts of this step, N1 = N + 1 places, E places that a row may emit (N1
unless the drafts are a tree), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tandem.model.network.tree import Tree
from tandem.model.sampling.ranking import TopCandidates
from tandem.model.sampling.sampler import SamplingRows


@dataclass(frozen=True, slots=True)
class AcceptanceRows:
    """How B rows want their drafts judged: the number of the kind (RULE_NUMBERS), the most drafts
    a row uses, and what its kind allows (Kind.bounds)."""

    rule_B: Tensor
    limit_B: Tensor
    bounds_B2: Tensor


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """``tokens_BE[b, : num_accepted_B[b] + 1]`` are the tokens row b emits this step, each at the
    node ``path_BE`` of a tree; without one at its own place."""

    tokens_BE: Tensor
    num_accepted_B: Tensor
    path_BE: Tensor | None = None

    def where(self, rows_B: Tensor, other: "VerifyResult") -> "VerifyResult":
        """This verdict where ``rows_B`` is True, ``other`` elsewhere."""
        path_BE, rows_B1 = self.path_BE, rows_B.unsqueeze(1)
        if path_BE is not None:
            assert other.path_BE is not None, "all are of one tree"
            path_BE = torch.where(rows_B1, path_BE, other.path_BE)
        return VerifyResult(
            torch.where(rows_B1, self.tokens_BE, other.tokens_BE),
            torch.where(rows_B, self.num_accepted_B, other.num_accepted_B),
            path_BE,
        )


COUNT_BASE = 256
"""Bound on the places of a row in a step, for ``Outcome``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict as the host reads it. ``counts_B`` holds two numbers, so that the flag of rows that
    are not finite costs no copy: the accepted drafts, and COUNT_BASE times the places of the row
    that come before the first one whose logits are not finite."""

    tokens_BE: Tensor
    counts_B: Tensor
    path_BE: Tensor | None = None

    @classmethod
    def of(cls, result: VerifyResult, finite_BN1: Tensor) -> Self:
        """``finite_BN1``: whether the logits of each place, or of each node, are finite."""
        path_BE, finite_BE = result.path_BE, finite_BN1
        if path_BE is not None:
            finite_BE = finite_BN1.gather(1, path_BE)
        num_finite_B = finite_BE.cumprod(1).sum(1)
        counts_B = result.num_accepted_B.add(num_finite_B, alpha=COUNT_BASE)
        return cls(result.tokens_BE, counts_B, path_BE)

    def row_outputs(self, num_rows: int) -> "list[RowOutput]":
        """Return what each of the first ``num_rows`` rows emits."""
        rows = zip(self.tokens_BE.tolist(), self.counts_B[:num_rows].tolist(), strict=False)
        return [RowOutput.of(tokens, counts) for tokens, counts in rows]


class RowOutput(NamedTuple):
    """Tokens that a row emits in a step, ``num_accepted`` of them drafts. Unless ``is_finite`` the
    logits of the token after them are no finite numbers, and the answer cannot go on."""

    token_ids: tuple[int, ...]
    num_accepted: int
    is_finite: bool = True

    @classmethod
    def of(cls, tokens: list[int], counts: int) -> Self:
        num_finite, num_accepted = divmod(counts, COUNT_BASE)
        num = min(num_finite, num_accepted + 1)
        return cls((*tokens[:num],), min(num, num_accepted), num_finite > num_accepted)


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """One verified step of a whole batch; place i comes after drafts < i, or is node i of ``tree``,
    of which the first ``num_B`` drafts of a row are any (None: all).

    ``q_BNV`` are the probabilities that the drafts of rows of kind "rejection" were drawn from, of
    siblings without those before (rows of other kinds may hold anything); None if the drafts are
    deterministic.
    ``adjusted_BN1V`` are the main model's logits after bias, penalties and min_tokens, before
    temperature; ``targets_BN1`` what it chose from them, with the request's own noise.
    ``num_output_B`` tokens were emitted before. ``thinking_B`` is the think phase before the
    drafts, ``think_ids`` the tokens that begin and end it; only relaxed kinds read them.
    """

    drafts_BN: Tensor
    q_BNV: Tensor | None
    adjusted_BN1V: Tensor
    targets_BN1: Tensor
    sampling: SamplingRows
    acceptance: AcceptanceRows
    num_output_B: Tensor
    thinking_B: Tensor
    think_ids: tuple[int, int] | None
    tree: Tree | None = None
    num_B: Tensor | None = None


SampledDraft = tuple[Tensor, Tensor | None]
"""Draft tokens [B] and the probabilities they were drawn from [B, V], None if a draft is a function
of its logits."""
DraftSampler = Callable[[Tensor, SamplingRows, Tensor], SampledDraft]
"""Of ``(adjusted draft logits [B, V], sampling, output index [B])``."""
CandidateRanker = Callable[[Tensor, SamplingRows, Tensor, Tree, int], TopCandidates]
"""Of ``(adjusted draft logits [B, Q, V], sampling, emitted tokens [B], nodes, ranks)``."""


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """How drafts are picked, for trees ranked, and how they are judged: these belong together. All
    work on all rows of a batch, with static shapes and without waiting for the host. Of what a
    request says (core/request.py: Speculation) it reads two ``bounds``."""

    sample_draft: DraftSampler
    top_candidates: CandidateRanker
    accept_drafts: Callable[[VerifyInput], VerifyResult]
    bounds: tuple[str, str] = ("relaxed_top_n", "relaxed_delta")
