"""One decode step as functions over tensors: draft, verify, judge, commit (design.md).

Shapes depend only on (rows, drafts, pages) and nothing inside waits for the host.
Shape legend: B rows, N drafts, N1 = N + 1 places, D hidden, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decode_node.planning.step_plan import StepKey
from decode_node.program.rows import RowState, RowTensors
from model.drafters.base import Drafter, Drafts, Emitted, View
from model.loaded import LoadedModel
from model.network.batch import Batch, physical_slots
from model.network.cache import MAIN, Caches
from model.network.deepseek import DeepseekV3
from model.sampling.acceptance import judge, pick_draft
from model.sampling.acceptance.base import Evidence, Verdict
from model.sampling.sampler import adjusted_places, draw_places
from model.sampling.thinking import phase_after


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What verification found, with hidden states [B, N1, D] and logits [B, N1, V] of its places,
    and the state of the rows after it."""

    verdict: Verdict
    hidden_BND: Tensor
    logits_BNV: Tensor
    state: RowState


def decode_step(
    loaded: LoadedModel,
    caches: Caches,
    rows: RowTensors,
    key: StepKey,
    fed: Drafts | None = None,
) -> StepOutput:
    """Advance every row by its accepted drafts plus one token of the main model's own. Drafts that
    are not ``fed`` are made here."""
    assert (rows.sampling.rules is not None) == key.extras.has_rules, "rules come if a row has some"
    drafts = draft(loaded.drafter, caches, rows, key) if fed is None else fed
    hidden_BND, logits_BNV = verify(loaded.network, caches, rows, drafts)
    state, acceptance = rows.state, rows.acceptance
    if drafts.num_B is not None:
        acceptance = replace(acceptance, limit_B=acceptance.limit_B.minimum(drafts.num_B))
    adjusted_BNV = adjusted_places(logits_BNV, rows.sampling, state.num_output_B, drafts.tokens_BN)
    evidence = Evidence(
        drafts_BN=drafts.tokens_BN,
        q_BNV=drafts.q_BNV,
        adjusted_BN1V=adjusted_BNV,
        targets_BN1=draw_places(adjusted_BNV, rows.sampling, state.num_output_B),
        sampling=rows.sampling,
        acceptance=acceptance,
        num_output_B=state.num_output_B,
        thinking_B=state.thinking_B,
        think_ids=loaded.think_ids,
    )
    verdict = judge(key.extras.kinds, evidence)
    after = commit(loaded, state, key, verdict, hidden_BND)
    return StepOutput(verdict, hidden_BND, logits_BNV, after)


def draft(drafter: Drafter, caches: Caches, rows: RowTensors, key: StepKey) -> Drafts:
    """The drafter's part of a step."""
    state = rows.state
    kinds, kind_B, num_output_B = key.extras.kinds, rows.acceptance.kind_B, state.num_output_B
    view = View(
        last_B1=state.last_B1,
        num_known_B=state.num_known_B,
        page_table_BP=rows.page_table_BP,
        real_B=rows.real_B,
        pick=lambda logits_BV, drafts_BN: pick_draft(
            kinds, kind_B, logits_BV, rows.sampling, num_output_B, drafts_BN
        ),
    )
    return drafter.draft(state.drafter, view, key.num_drafts, key.catch_up, caches)


def verify(
    network: DeepseekV3, caches: Caches, rows: RowTensors, drafts: Drafts
) -> tuple[Tensor, Tensor]:
    """Main model over [last token, drafts]: hidden [B, N1, D] and logits [B, N1, V]."""
    slots = verify_slots(rows.state.num_known_B, drafts.tokens_BN.shape[1])
    page_size = caches[MAIN][0].shape[1]
    batch = Batch(
        token_ids_BQ=torch.cat((rows.state.last_B1, drafts.tokens_BN), 1),
        positions_BQ=slots,
        write_slots_BQ=physical_slots(rows.page_table_BP, slots, None, page_size),
        context_lens_BQ=slots + 1,
        page_table_BP=rows.page_table_BP,
        real_BQ=rows.real_B.unsqueeze(1).expand_as(slots),
    )
    hidden_BND = network(batch, caches)
    return hidden_BND, network.logits(hidden_BND)


def verify_slots(num_known_B: Tensor, num_drafts: int) -> Tensor:
    """Main-model slots [B, N1] of the last token and its drafts; positions are the same."""
    offsets = torch.arange(num_drafts + 1, device=num_known_B.device)
    return (num_known_B - 1).unsqueeze(1) + offsets


def commit(
    loaded: LoadedModel, state: RowState, key: StepKey, verdict: Verdict, hidden_BND: Tensor
) -> RowState:
    """Lengths advance by what was emitted. Cache slots past the new length are simply written again
    later; what the drafter keeps of the step is its own affair."""
    drafter, think_ids = loaded.drafter, loaded.think_ids
    num_emitted_B = verdict.num_accepted_B + 1
    features_BN1F = hidden_BND if drafter.num_features else hidden_BND[..., :0]
    emitted = Emitted(verdict.tokens_BN1, num_emitted_B, features_BN1F)
    return RowState(
        last_B1=verdict.tokens_BN1.gather(1, verdict.num_accepted_B.unsqueeze(1)),
        num_known_B=state.num_known_B + num_emitted_B,
        num_output_B=state.num_output_B + num_emitted_B,
        thinking_B=phase_after(state.thinking_B, verdict.tokens_BN1, num_emitted_B, think_ids),
        drafter=drafter.commit(state.drafter, emitted, key.catch_up),
    )
