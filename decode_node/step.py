"""One decode step as a program over tensors: draft, verify, accept, commit (design.md).

Shapes depend only on (rows, drafts, pages) and nothing inside waits for the host.
Shape legend: B rows, N drafts, M = n_max + 1, D hidden, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_node.rows import RowTensors
from model.accept import Verdict, accept_chain
from model.adjust import AdjustRows
from model.batch import Batch, physical_slots
from model.cache import MAIN, Caches
from model.deepseek import DeepseekV3
from model.drafters.base import Drafter, Drafts, DraftState
from model.drafters.mtp_rows import verify_slots
from model.logprobs import LogprobRows, raw_logprobs
from model.sampling import SamplingRows, choose


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
    num_drafts: int,
    *,
    all_greedy: bool,
    rules: AdjustRows | None = None,
    num_logprobs: int | None = None,
) -> StepOutput:
    """Advance every row by its accepted drafts plus one token of the main model's own.

    ``rules`` None: no row has any. ``num_logprobs``: the most that any row asks for, if one does.
    """
    sampling = rows.sampling(all_greedy=all_greedy, rules=rules)
    drafts = drafter.draft(draft_state(rows, sampling), num_drafts, caches)
    hidden_BND, logits_BNV = verify(network, caches, rows, drafts)
    targets_BN1 = choose_all(logits_BNV, sampling, rows.num_output_B, drafts.tokens_BN)
    verdict = accept_chain(drafts.tokens_BN, targets_BN1, rows.limit_B)
    logprobs = None
    if num_logprobs is not None:
        logprobs = raw_logprobs(logits_BNV, targets_BN1, num_logprobs)
    return StepOutput(verdict, drafts.tokens_BN, commit(rows, verdict, hidden_BND), logprobs)


def draft_state(rows: RowTensors, sampling: SamplingRows) -> DraftState:
    return DraftState(
        tokens_BM=rows.tokens_BM,
        hidden_BMD=rows.hidden_BMD,
        num_emitted_B=rows.num_emitted_B,
        num_known_B=rows.num_known_B,
        first_B=rows.first_B,
        page_table_BP=rows.page_table_BP,
        pick=lambda logits_BV, drafts_BN: choose(logits_BV, sampling, rows.num_output_B, drafts_BN),
    )


def verify(
    network: DeepseekV3, caches: Caches, rows: RowTensors, drafts: Drafts
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
    )
    hidden_BND = network(batch, caches)
    return hidden_BND, network.logits(hidden_BND)


def choose_all(
    logits_BNV: Tensor, sampling: SamplingRows, num_output_B: Tensor, drafts_BN: Tensor
) -> Tensor:
    """The main model's own token at each of the N+1 places [B, N+1], given the drafts before."""
    if sampling.plain:
        return logits_BNV.argmax(-1)
    columns = [
        choose(logits_BNV[:, i], sampling, num_output_B, drafts_BN[:, :i])
        for i in range(logits_BNV.shape[1])
    ]
    return torch.stack(columns, 1)


def commit(rows: RowTensors, verdict: Verdict, hidden_BND: Tensor) -> RowTensors:
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
    )
