"""The acceptance seam: what verification knows, and what a kind of acceptance makes of it.

Shape legend: B rows, N drafts of this step, N1 = N + 1 places, E places that a row may emit (N1
unless the drafts are a tree), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.network.tree import Tree
from model.sampling.ranking import Ranked
from model.sampling.sampler import SamplingRows


@dataclass(frozen=True, slots=True)
class AcceptanceRows:
    """How B rows want their drafts judged: the number of the kind (KIND_NUMBERS), the most drafts
    a row uses, and what its kind allows (Kind.bounds)."""

    kind_B: Tensor
    limit_B: Tensor
    bounds_B2: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """``tokens_BE[b, : num_accepted_B[b] + 1]`` are the tokens row b emits this step, each at the
    node ``path_BE`` of a tree; without one at its own place."""

    tokens_BE: Tensor
    num_accepted_B: Tensor
    path_BE: Tensor | None = None

    def where(self, rows_B: Tensor, other: "Verdict") -> "Verdict":
        """This verdict where ``rows_B`` is True, ``other`` elsewhere."""
        path_BE, rows_B1 = self.path_BE, rows_B.unsqueeze(1)
        if path_BE is not None:
            assert other.path_BE is not None, "all are of one tree"
            path_BE = torch.where(rows_B1, path_BE, other.path_BE)
        return Verdict(
            torch.where(rows_B1, self.tokens_BE, other.tokens_BE),
            torch.where(rows_B, self.num_accepted_B, other.num_accepted_B),
            path_BE,
        )


@dataclass(frozen=True, slots=True)
class Evidence:
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


Picked = tuple[Tensor, Tensor | None]
"""Draft tokens [B] and the probabilities they were drawn from [B, V], None if a draft is a function
of its logits."""
Pick = Callable[[Tensor, SamplingRows, Tensor], Picked]
"""Of ``(adjusted draft logits [B, V], sampling, output index [B])``."""
Ranking = Callable[[Tensor, SamplingRows, Tensor, Tree, int], Ranked]
"""Of ``(adjusted draft logits [B, Q, V], sampling, emitted tokens [B], nodes, ranks)``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How drafts are picked, for trees ranked, and how they are judged: these belong together. All
    work on all rows of a batch, with static shapes and without waiting for the host. Of what a
    request says (core.request.Speculation) it reads two ``bounds``."""

    pick: Pick
    rank: Ranking
    judge: Callable[[Evidence], Verdict]
    bounds: tuple[str, str] = ("relaxed_top_n", "relaxed_delta")
