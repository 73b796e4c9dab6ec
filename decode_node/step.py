"""One decode step as a program over tensors: draft, verify, accept, commit (design.md).

Shapes depend only on (rows, drafts, pages) and nothing inside waits for the host.
Shape legend: B rows, N drafts, M tokens pending at most, D hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_node.plan import PLAIN, StepKey
from decode_node.rows import RowState, RowTensors
from model.acceptance import judge, pick_draft
from model.acceptance.base import Evidence, Verdict
from model.batch import Batch, physical_slots
from model.cache import MAIN, Caches
from model.deepseek import DeepseekV3
from model.drafters.base import Drafter, Drafts, DraftState
from model.logprobs import LogprobRows, raw_logprobs
from model.sampling import adjusted_places, draw_places
from model.think import ThinkIds, phase_after


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What verification found, and the state of the rows after it."""

    verdict: Verdict
    state: RowState
    logprobs: LogprobRows | None


def decode_step(
    network: DeepseekV3,
    drafter: Drafter,
    caches: Caches,
    rows: RowTensors,
    key: StepKey,
    think_ids: ThinkIds | None = None,
) -> StepOutput:
    """Advance every row by its accepted drafts plus one token of the main model's own."""
    extras = key.extras
    assert (rows.sampling.rules is not None) == extras.has_rules, "rules come if a row has some"
    drafts = Drafts(rows.state.tokens_BM[:, :0])
    if key.width:
        state = draft_state(rows, key.width, extras.kinds)
        drafts = drafter.draft(state, key.num_drafts, caches)
    hidden_BND, logits_BNV = verify(network, caches, rows, drafts)
    verdict = judge(extras.kinds, gather_evidence(rows, drafts, logits_BNV, think_ids))
    logprobs = None
    if extras.num_logprobs is not None:
        logprobs = raw_logprobs(logits_BNV, verdict.tokens_BN1, extras.num_logprobs)
    phase_B = phase_after(
        rows.state.thinking_B, verdict.tokens_BN1, verdict.num_accepted_B + 1, think_ids
    )
    follow = commit if key.width else put_off
    return StepOutput(verdict, follow(rows.state, verdict, hidden_BND, phase_B), logprobs)


def draft_state(rows: RowTensors, width: int, kinds: tuple[str, ...] = PLAIN.kinds) -> DraftState:
    """The rows as a drafter sees them, no wider than pass 1 is."""
    state, kind_B, sampling = rows.state, rows.acceptance.kind_B, rows.sampling
    return DraftState(
        tokens_BM=state.tokens_BM[:, :width],
        hidden_BMD=state.hidden_BMD[:, :width],
        num_pending_B=state.num_pending_B,
        num_known_B=state.num_known_B,
        first_B=state.first_B,
        page_table_BP=rows.page_table_BP,
        pick=lambda logits_BV, drafts_BN: pick_draft(
            kinds, kind_B, logits_BV, sampling, state.num_output_B, drafts_BN
        ),
        real_B=rows.real_B,
    )


def verify(
    network: DeepseekV3, caches: Caches, rows: RowTensors, drafts: Drafts
) -> tuple[Tensor, Tensor]:
    """Main model over [last token, drafts]: hidden [B, N+1, D] and logits [B, N+1, V]."""
    state = rows.state
    last_B1 = state.tokens_BM.gather(1, (state.num_pending_B - 1).unsqueeze(1))
    slots = verify_slots(state.num_known_B, drafts.tokens_BN.shape[1])
    page_size = caches[MAIN][0].shape[1]
    batch = Batch(
        token_ids_BQ=torch.cat((last_B1, drafts.tokens_BN), 1),
        positions_BQ=slots,
        write_slots_BQ=physical_slots(rows.page_table_BP, slots, None, page_size),
        context_lens_BQ=slots + 1,
        page_table_BP=rows.page_table_BP,
        real_BQ=rows.real_B.unsqueeze(1).expand_as(slots),
    )
    hidden_BND = network(batch, caches)
    return hidden_BND, network.logits(hidden_BND)


def verify_slots(num_known_B: Tensor, num_drafts: int) -> Tensor:
    """Main-model slots [B, N + 1] of the last token and its drafts; positions are the same."""
    offsets = torch.arange(num_drafts + 1, device=num_known_B.device)
    return (num_known_B - 1).unsqueeze(1) + offsets


def gather_evidence(
    rows: RowTensors, drafts: Drafts, logits_BNV: Tensor, think_ids: ThinkIds | None
) -> Evidence:
    """What the main model makes of the drafts."""
    num_output_B = rows.state.num_output_B
    adjusted_BNV = adjusted_places(logits_BNV, rows.sampling, num_output_B, drafts.tokens_BN)
    return Evidence(
        drafts_BN=drafts.tokens_BN,
        q_BNV=drafts.q_BNV,
        adjusted_BN1V=adjusted_BNV,
        targets_BN1=draw_places(adjusted_BNV, rows.sampling, num_output_B),
        sampling=rows.sampling,
        acceptance=rows.acceptance,
        num_output_B=num_output_B,
        thinking_B=rows.state.thinking_B,
        think_ids=think_ids,
    )


def commit(state: RowState, verdict: Verdict, hidden_BND: Tensor, thinking_B: Tensor) -> RowState:
    """Lengths advance by what was emitted; the hidden states of the accepted rows stay for the
    next pass 1. Cache slots past the new length are simply written again later."""
    num_emitted_B = verdict.num_accepted_B + 1
    padding = state.tokens_BM.shape[1] - verdict.tokens_BN1.shape[1]
    return RowState(
        tokens_BM=F.pad(verdict.tokens_BN1, (0, padding)),
        hidden_BMD=F.pad(hidden_BND, (0, 0, 0, padding)),
        num_pending_B=num_emitted_B,
        num_known_B=state.num_known_B + num_emitted_B,
        num_output_B=state.num_output_B + num_emitted_B,
        first_B=torch.zeros_like(state.first_B),
        thinking_B=thinking_B,
    )


def put_off(state: RowState, verdict: Verdict, hidden_B1D: Tensor, thinking_B: Tensor) -> RowState:
    """``commit`` of a step without drafts that the drafter has no part in: what was emitted is
    added to what is pending."""
    at_B1 = state.num_pending_B.unsqueeze(1)
    at_B1D = at_B1.unsqueeze(2).expand_as(hidden_B1D)
    return RowState(
        tokens_BM=state.tokens_BM.scatter(1, at_B1, verdict.tokens_BN1),
        hidden_BMD=state.hidden_BMD.scatter(1, at_B1D, hidden_B1D),
        num_pending_B=state.num_pending_B + 1,
        num_known_B=state.num_known_B + 1,
        num_output_B=state.num_output_B + 1,
        first_B=state.first_B,
        thinking_B=thinking_B,
    )
