"""One decode step as functions over tensors: draft, verify, judge, commit (design.md).

Shapes depend only on (rows, level, pages) and nothing inside waits for the host.
Shape legend: B rows, N drafts, N1 = N + 1 places of a chain or nodes of a tree, E places that a row
may emit (N1 of a chain), D hidden, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.draft_shapes import DraftShape
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.rows import RowState, RowTensors
from tandem.model.drafters.base import DraftContext, Drafter, Drafts, Emitted
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch, physical_slots
from tandem.model.network.cache import MAIN, Caches
from tandem.model.network.tree import Tree, build_tree
from tandem.model.sampling.acceptance import accept_drafts, sample_draft, top_candidates
from tandem.model.sampling.acceptance.base import Outcome, VerifyInput, VerifyResult
from tandem.model.sampling.sampler import apply_rules_at_places, draw_at_places
from tandem.model.sampling.thinking import phase_after


class StepShape(NamedTuple):
    """A level, and the tree of one row if that is known before a step and no chain."""

    draft_shape: DraftShape
    tree: Tree | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What verification found, as the host reads it, with hidden states [B, E, D] and logits
    [B, E, V] of the places that its verdict tells, and what it gave the rows, with their state
    after it."""

    outcome: Outcome
    emitted: Emitted
    hidden_BED: Tensor
    logits_BEV: Tensor
    state: RowState


def decode_step(
    loaded: LoadedModel,
    caches: Caches,
    rows: RowTensors,
    key: StepKey,
    shape: StepShape,
    host_drafts: Drafts | None = None,
) -> StepOutput:
    """Advance every row by its accepted drafts plus one token of the main model's own. Drafts that
    are not ``host_drafts`` are made here."""
    assert (rows.sampling.rules is not None) == key.traits.has_logit_rules, (
        "rules come if a row has some"
    )
    drafts = (
        draft(loaded.drafter, caches, rows, key, shape.draft_shape)
        if host_drafts is None
        else host_drafts
    )
    tree = _tree(shape, drafts)
    hidden_BND, features_BNF, logits_BNV = verify(loaded, caches, rows, drafts, tree)
    found = verify_input(loaded, rows, drafts, logits_BNV, tree)
    result = accept_drafts(key.traits.rule_names, found)
    outcome = Outcome.of(result, rows.sampling.sampler.are_finite(found.adjusted_BN1V))
    if result.path_BE is not None:
        move_path(loaded, caches[MAIN], rows, result)
        is_same, features_BNF = (
            features_BNF is hidden_BND,
            gather_path(features_BNF, result.path_BE),
        )
        hidden_BND = features_BNF if is_same else gather_path(hidden_BND, result.path_BE)
        logits_BNV = gather_path(logits_BNV, result.path_BE)
    emitted = Emitted(result.tokens_BE, result.num_accepted_B + 1, features_BNF)
    after = commit(loaded, rows.state, key, result, emitted)
    return StepOutput(outcome, emitted, hidden_BND, logits_BNV, after)


def _tree(shape: StepShape, drafts: Drafts) -> Tree | None:
    """Of all rows, None where drafts are chains."""
    if drafts.parents_BN is not None:
        return build_tree(drafts.parents_BN, shape.draft_shape.depth)
    return None if shape.tree is None else shape.tree.expand(len(drafts.tokens_BN))


def verify_input(
    loaded: LoadedModel, rows: RowTensors, drafts: Drafts, logits_BNV: Tensor, tree: Tree | None
) -> VerifyInput:
    """What drafts are judged by."""
    state, sampling, acceptance = rows.state, rows.sampling, rows.acceptance
    if drafts.num_B is not None and tree is None:
        acceptance = replace(acceptance, limit_B=acceptance.limit_B.minimum(drafts.num_B))
    sampling_args = sampling, state.num_output_B
    adjusted_BNV = apply_rules_at_places(logits_BNV, *sampling_args, drafts.tokens_BN, tree)
    return VerifyInput(
        drafts_BN=drafts.tokens_BN,
        q_BNV=drafts.q_BNV,
        adjusted_BN1V=adjusted_BNV,
        targets_BN1=draw_at_places(adjusted_BNV, *sampling_args, tree),
        sampling=sampling,
        acceptance=acceptance,
        num_output_B=state.num_output_B,
        thinking_B=state.thinking_B,
        think_ids=loaded.think_ids,
        tree=tree,
        num_B=drafts.num_B,
    )


def draft(
    drafter: Drafter, caches: Caches, rows: RowTensors, key: StepKey, level: DraftShape
) -> Drafts:
    """The drafter's part of a step."""
    state = rows.state
    assert rows.rows_B is not None, "rows are selected"
    rule_args = key.traits.rule_names, rows.acceptance.rule_B
    sampling = rows.sampling, state.num_output_B
    known = state.last_B1, state.num_known_B, rows.page_table_BP, rows.real_B
    context = DraftContext(
        *known,
        *(rows.rows_B, rows.table),
        sample_draft=lambda logits_BV, drafts_BN: sample_draft(
            *rule_args, logits_BV, *sampling, drafts_BN
        ),
        top_candidates=lambda logits_BQV, *of: top_candidates(
            *rule_args, logits_BQV, *sampling, *of
        ),
    )
    return drafter.draft(state.drafter, context, level, key.catch_up, caches)


def verify(
    loaded: LoadedModel, caches: Caches, rows: RowTensors, drafts: Drafts, tree: Tree | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Main model over [last token, drafts]: hidden [B, N1, D], features [B, N1, F] for the drafter
    and logits [B, N1, V]. The nodes of a tree lie behind the context by their numbers, and each
    sees that and its own path."""
    slots = verify_slots(rows.state.num_known_B, drafts.tokens_BN.shape[1])
    positions_BQ, context_lens_BQ = slots, slots + 1
    if tree is not None:
        positions_BQ, context_lens_BQ = slots[:, :1] + tree.depth_BQ, slots[:, :1].expand_as(slots)
    page_size = caches[MAIN][0].shape[1]
    batch = Batch(
        token_ids_BQ=torch.cat((rows.state.last_B1, drafts.tokens_BN), 1),
        positions_BQ=positions_BQ,
        write_slots_BQ=physical_slots(rows.page_table_BP, slots, None, page_size),
        context_lens_BQ=context_lens_BQ,
        page_table_BP=rows.page_table_BP,
        real_BQ=rows.real_B.unsqueeze(1).expand_as(slots),
        bits_BQ=None if tree is None else tree.bits_BQ,
    )
    network, drafter = loaded.network, loaded.drafter
    hidden_BND, features_BNF = network.forward_with_taps(batch, caches, drafter.taps)
    if not drafter.num_features:
        features_BNF = features_BNF[..., :0]
    return hidden_BND, features_BNF, network.logits(hidden_BND)


def verify_slots(num_known_B: Tensor, num_drafts: int) -> Tensor:
    """Main-model slots [B, N1] of the last token and its drafts; of a chain positions, too."""
    offsets = torch.arange(num_drafts + 1, device=num_known_B.device)
    return (num_known_B - 1).unsqueeze(1) + offsets


def move_path(
    loaded: LoadedModel, caches: list[Tensor], rows: RowTensors, result: VerifyResult
) -> None:
    """Entries of accepted drafts go to where a chain would have put them; what is left of the tree
    behind them is written again later."""
    assert result.path_BE is not None
    start_B1, page_size = (rows.state.num_known_B - 1).unsqueeze(1), caches[0].shape[1]
    depth_E = torch.arange(1, result.path_BE.shape[1], device=start_B1.device)
    keep_BE = depth_E <= result.num_accepted_B.unsqueeze(1)
    from_BE, to_BE = (
        physical_slots(rows.page_table_BP, start_B1 + offsets, keep_BE, page_size)
        for offsets in (result.path_BE[:, 1:], depth_E)
    )
    loaded.kernels.copy_slots(caches, from_BE, to_BE)


def gather_path(x_BNX: Tensor, path_BE: Tensor) -> Tensor:
    """What stands at the nodes of each row's path: [B, E, X]."""
    return x_BNX.gather(1, path_BE.unsqueeze(2).expand(-1, -1, x_BNX.shape[2]))


def commit(
    loaded: LoadedModel, state: RowState, key: StepKey, result: VerifyResult, emitted: Emitted
) -> RowState:
    """Lengths advance by what was emitted. Cache slots past the new length are simply written again
    later; what the drafter keeps of the step is its own affair."""
    drafter, think_ids = loaded.drafter, loaded.think_ids
    return RowState(
        last_B1=result.tokens_BE.gather(1, result.num_accepted_B.unsqueeze(1)),
        num_known_B=state.num_known_B + emitted.num_B,
        num_output_B=state.num_output_B + emitted.num_B,
        thinking_B=phase_after(state.thinking_B, emitted.tokens_BE, emitted.num_B, think_ids),
        drafter=drafter.commit(state.drafter, emitted, key.catch_up),
    )
