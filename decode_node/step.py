"""One decode step as a program over tensors: draft, verify, accept, commit (design.md).

Shapes depend only on (rows, drafts, pages) and nothing inside waits for the host.
Shape legend: B rows, N drafts, M = n_max + 1, D hidden, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from core.request import STRICT
from decode_node.rows import RowTensors
from model.acceptance import judge, pick_draft
from model.acceptance.base import Evidence, Verdict
from model.adjust import AdjustRows
from model.batch import Batch, physical_slots
from model.cache import MAIN, Caches
from model.deepseek import DeepseekV3
from model.drafters.base import Drafter, Drafts, DraftState
from model.drafters.mtp_rows import verify_slots
from model.logprobs import LogprobRows, raw_logprobs
from model.sampling import SamplingRows, adjusted_places, draw_places
from model.think import ThinkIds, phase_after


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host decides about a step. With the number of rows and the width of the page table
    it fixes every tensor's shape, so a captured graph can be kept by these.

    ``num_emitted_most`` bounds what a row emitted last round, which pass 1 catches up with.
    ``has_rules``: some row adjusts its logits. ``num_logprobs`` is the most that any row asks
    for, None if none does. ``kinds`` are the kinds of acceptance of its rows, sorted.
    """

    num_drafts: int
    num_emitted_most: int
    all_greedy: bool = False
    has_rules: bool = False
    num_logprobs: int | None = None
    kinds: tuple[str, ...] = (STRICT,)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What verification found, and the row state after it."""

    verdict: Verdict
    drafts_BN: Tensor
    rows: RowTensors
    logprobs: LogprobRows | None


def decode_step(
    network: DeepseekV3,
    drafter: Drafter,
    caches: Caches,
    rows: RowTensors,
    shape: StepShape,
    rules: AdjustRows | None = None,
    max_pages_B: tuple[int, ...] = (),
    think_ids: ThinkIds | None = None,
) -> StepOutput:
    """Advance every row by its accepted drafts plus one token of the main model's own.

    ``max_pages_B`` bounds the pages that each row reads, empty if all of its table counts.
    """
    assert (rules is not None) == shape.has_rules, "rules come if and only if a row has some"
    sampling = rows.sampling(all_greedy=shape.all_greedy, rules=rules)
    state = draft_state(rows, sampling, shape, max_pages_B)
    drafts = drafter.draft(state, shape.num_drafts, caches)
    hidden_BND, logits_BNV = verify(network, caches, rows, drafts, max_pages_B)
    evidence = gather_evidence(rows, sampling, drafts, logits_BNV, think_ids)
    verdict = judge(shape.kinds, rows.kind_B, evidence)
    logprobs = None
    if shape.num_logprobs is not None:
        logprobs = raw_logprobs(logits_BNV, verdict.tokens_BN1, shape.num_logprobs)
    after = commit(rows, verdict, hidden_BND, think_ids)
    return StepOutput(verdict, drafts.tokens_BN, after, logprobs)


def draft_state(
    rows: RowTensors, sampling: SamplingRows, shape: StepShape, max_pages_B: tuple[int, ...] = ()
) -> DraftState:
    """The rows as a drafter sees them: no wider than what the last round can have emitted."""
    return DraftState(
        tokens_BM=rows.tokens_BM[:, : shape.num_emitted_most],
        hidden_BMD=rows.hidden_BMD[:, : shape.num_emitted_most],
        num_emitted_B=rows.num_emitted_B,
        num_known_B=rows.num_known_B,
        first_B=rows.first_B,
        page_table_BP=rows.page_table_BP,
        max_pages_B=max_pages_B,
        pick=lambda logits_BV, drafts_BN: pick_draft(
            shape.kinds, rows.kind_B, logits_BV, sampling, rows.num_output_B, drafts_BN
        ),
    )


def verify(
    network: DeepseekV3,
    caches: Caches,
    rows: RowTensors,
    drafts: Drafts,
    max_pages_B: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Main model over [last token, drafts]: hidden [B, N+1, D] and logits [B, N+1, V]."""
    last_B1 = rows.tokens_BM.gather(1, (rows.num_emitted_B - 1).unsqueeze(1))
    slots = verify_slots(rows.num_known_B, drafts.tokens_BN.shape[1])
    page_size = caches[MAIN][0].shape[1]
    keep = torch.ones_like(slots, dtype=torch.bool)
    batch = Batch(
        token_ids_BQ=torch.cat((last_B1, drafts.tokens_BN), 1),
        positions_BQ=slots,
        write_slots_BQ=physical_slots(rows.page_table_BP, slots, keep, page_size),
        context_lens_BQ=slots + 1,
        page_table_BP=rows.page_table_BP,
        max_pages_B=max_pages_B,
    )
    hidden_BND = network(batch, caches)
    return hidden_BND, network.logits(hidden_BND)


def gather_evidence(
    rows: RowTensors,
    sampling: SamplingRows,
    drafts: Drafts,
    logits_BNV: Tensor,
    think_ids: ThinkIds | None,
) -> Evidence:
    """What the main model makes of the drafts."""
    adjusted_BNV = adjusted_places(logits_BNV, sampling, rows.num_output_B, drafts.tokens_BN)
    return Evidence(
        drafts_BN=drafts.tokens_BN,
        q_BNV=drafts.q_BNV,
        adjusted_BN1V=adjusted_BNV,
        targets_BN1=draw_places(adjusted_BNV, sampling, rows.num_output_B),
        sampling=sampling,
        num_output_B=rows.num_output_B,
        limit_B=rows.limit_B,
        thinking_B=rows.thinking_B,
        think_ids=think_ids,
        relaxed_top_n_B=rows.relaxed_top_n_B,
        relaxed_delta_B=rows.relaxed_delta_B,
    )


def commit(
    rows: RowTensors, verdict: Verdict, hidden_BND: Tensor, think_ids: ThinkIds | None
) -> RowTensors:
    """Lengths advance by what was emitted; the hidden states of the accepted rows stay for the
    next pass 1. Cache slots past the new length are simply written again later."""
    num_emitted_B = verdict.num_accepted_B + 1
    padding = rows.tokens_BM.shape[1] - verdict.tokens_BN1.shape[1]
    return replace(
        rows,
        tokens_BM=F.pad(verdict.tokens_BN1, (0, padding)),
        hidden_BMD=F.pad(hidden_BND, (0, 0, 0, padding)),
        num_emitted_B=num_emitted_B,
        num_known_B=rows.num_known_B + num_emitted_B,
        num_output_B=rows.num_output_B + num_emitted_B,
        first_B=torch.zeros_like(rows.first_B),
        thinking_B=phase_after(rows.thinking_B, verdict.tokens_BN1, num_emitted_B, think_ids),
    )
