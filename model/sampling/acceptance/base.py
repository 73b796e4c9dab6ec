"""The interface of acceptance rules: the input of verification and its result.

Shape legend: B rows, N drafts of this step, Q tree nodes, M drafts so far, V vocabulary. N1 = N + 1
positions, E positions that a row may emit (N1 unless the drafts are a tree).
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
    """Acceptance settings of B rows.

    Attributes:
        rule_B: Number of each row's acceptance rule (``RULE_NUMBERS``).
        limit_B: Maximum number of drafts that a row may accept.
        bounds_B2: The two settings that the rule reads (``AcceptanceRule.bounds``).
    """

    rule_B: Tensor
    limit_B: Tensor
    bounds_B2: Tensor


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Drafts accepted in one step.

    Attributes:
        tokens_BE: Emitted tokens; row b emits the first ``num_accepted_B[b] + 1``.
        num_accepted_B: Number of accepted drafts per row.
        path_BE: Tree node before each emitted token, 0 for the last known token. None for chains,
            where token e is the prediction at position e.
    """

    tokens_BE: Tensor
    num_accepted_B: Tensor
    path_BE: Tensor | None = None

    def where(self, rows_B: Tensor, other: "VerifyResult") -> "VerifyResult":
        """Return this result in the rows where ``rows_B`` is True, and ``other`` elsewhere."""
        path_BE = self.path_BE
        rows_B1 = rows_B.unsqueeze(1)
        if path_BE is not None:
            assert other.path_BE is not None, "both results must have paths in the same tree"
            path_BE = torch.where(rows_B1, path_BE, other.path_BE)
        return VerifyResult(
            torch.where(rows_B1, self.tokens_BE, other.tokens_BE),
            torch.where(rows_B, self.num_accepted_B, other.num_accepted_B),
            path_BE,
        )


COUNT_BASE = 256
"""Factor that separates the two numbers in ``Outcome.counts_B``. A row has fewer positions per
step."""


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """A verification result in the form that the host reads.

    ``counts_B`` packs two numbers, so that the check for non-finite logits needs no extra copy. It
    is the number of accepted drafts, plus COUNT_BASE times the number of leading positions with
    finite logits.
    """

    tokens_BE: Tensor
    counts_B: Tensor
    path_BE: Tensor | None = None

    @classmethod
    def of(cls, result: VerifyResult, finite_BN1: Tensor) -> Self:
        """Pack ``result``. ``finite_BN1`` is True for each position, or tree node, with finite
        logits."""
        path_BE = result.path_BE
        finite_BE = finite_BN1
        if path_BE is not None:
            finite_BE = finite_BN1.gather(1, path_BE)
        num_finite_B = finite_BE.cumprod(1).sum(1)
        counts_B = result.num_accepted_B.add(num_finite_B, alpha=COUNT_BASE)
        return cls(result.tokens_BE, counts_B, path_BE)

    def row_outputs(self, num_rows: int) -> "list[RowOutput]":
        """Return the output of each of the first ``num_rows`` rows."""
        rows = zip(self.tokens_BE.tolist(), self.counts_B[:num_rows].tolist(), strict=False)
        return [RowOutput.of(tokens, counts) for tokens, counts in rows]


class RowOutput(NamedTuple):
    """Tokens that one row emits in a step.

    Attributes:
        token_ids: Emitted tokens, up to the first position whose logits are not finite.
        num_accepted: Number of drafts among them.
        is_finite: False if the logits of the token after them are not finite, so the sequence
            cannot continue.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    is_finite: bool = True

    @classmethod
    def of(cls, tokens: list[int], counts: int) -> Self:
        """Unpack one row of ``VerifyOutcome``."""
        num_finite, num_accepted = divmod(counts, COUNT_BASE)
        num = min(num_finite, num_accepted + 1)
        return cls((*tokens[:num],), min(num, num_accepted), num_finite > num_accepted)


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """One verification step of a batch.

    Position i of a chain follows the drafts before i. In a tree, position i is node i.

    Attributes:
        drafts_BN: Draft tokens.
        q_BNV: Distribution that each draft was sampled from, for rows with rule "rejection"; other
            rows may hold any values. Siblings are sampled without replacement. None for
            deterministic drafts.
        adjusted_BN1V: Logits of the main model after bias, penalties and min_tokens, before
            temperature.
        targets_BN1: Tokens that the main model samples from these logits. The random noise is a
            function of the request's seed and the output index.
        sampling: Sampling settings.
        acceptance: Acceptance settings.
        num_output_B: Number of tokens emitted before this step.
        thinking_B: True if the position of the first draft is in the thinking part.
        think_ids: Tokens that start and end the thinking part; read by the relaxed rules only.
        tree: The tree of drafts, None for chains.
        num_B: Number of valid drafts per row; they come first. None if all N are valid.
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
"""Draft tokens [B] and the distribution that they were sampled from [B, V]. The latter is None if
the acceptance rule does not need it."""
DraftSampler = Callable[[Tensor, SamplingRows, Tensor], SampledDraft]
"""Function of (adjusted draft logits [B, V], sampling settings, output index [B])."""
CandidateRanker = Callable[[Tensor, SamplingRows, Tensor, Tree, int], TopCandidates]
"""Function of (adjusted draft logits [B, Q, V], sampling settings, number of emitted tokens [B],
nodes, number of candidates per node)."""


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """A way to choose drafts together with the test that accepts them; the two depend on each
    other.

    All functions run on all rows of a batch, with static shapes and without waiting for the host.

    Attributes:
        sample_draft: Samples the next draft of a chain.
        top_candidates: Ranks the tokens that may follow the nodes of a tree.
        accept_drafts: Decides which drafts are accepted.
        bounds: Names of the two settings in ``Speculation`` (core/request.py) that the rule reads.
    """

    sample_draft: DraftSampler
    top_candidates: CandidateRanker
    accept_drafts: Callable[[VerifyInput], VerifyResult]
    bounds: tuple[str, str] = ("relaxed_top_n", "relaxed_delta")
