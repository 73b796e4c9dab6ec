"""One decode step as functions over tensors: draft, verify, accept, commit.

Shapes depend only on (rows, draft shape, pages), and no function waits for the host.

Shape legend:
    B: rows
    N: drafts of a row
    N1: N + 1 places: the last known token and the drafts
    E: places whose tokens a row may emit; N1 for a chain
    D: hidden size
    V: vocabulary
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
from tandem.model.sampling.acceptance.base import VerifyInput, VerifyOutcome, VerifyResult
from tandem.model.sampling.sampler import apply_rules_at_places, draw_at_places
from tandem.model.sampling.thinking import phase_after


class StepShape(NamedTuple):
    """A draft shape, and the tree of one row. ``tree`` is None for chains and per-step trees."""

    draft_shape: DraftShape
    tree: Tree | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step.

    Attributes:
        outcome: Accepted tokens, in the form that the host reads.
        emitted: Emitted tokens and their features, in the form that drafters read.
        hidden_BED: Hidden states of the places whose tokens a row may emit.
        logits_BEV: Raw logits of these places.
        state: State of the rows after the step.
    """

    outcome: VerifyOutcome
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
    """Advance every row by its accepted drafts plus one token from the main model.

    Calls the drafter unless ``host_drafts`` are given.
    """
    assert (rows.sampling.rules is not None) == key.traits.has_logit_rules, (
        "logit rules must be given if, and only if, a row has some"
    )
    drafts = (
        draft(
            drafter=loaded.drafter, caches=caches, rows=rows, key=key, draft_shape=shape.draft_shape
        )
        if host_drafts is None
        else host_drafts
    )
    tree = _tree(shape, drafts)
    hidden_BND, features_BNF, logits_BNV = verify(
        loaded=loaded, caches=caches, rows=rows, drafts=drafts, tree=tree
    )
    found = verify_input(loaded=loaded, rows=rows, drafts=drafts, logits_BNV=logits_BNV, tree=tree)
    result = accept_drafts(key.traits.rule_names, found)
    outcome = VerifyOutcome.of(result, rows.sampling.sampler.are_finite(found.adjusted_BN1V))
    if result.path_BE is not None:
        move_path(loaded=loaded, caches=caches[MAIN], rows=rows, result=result)
        is_same = features_BNF is hidden_BND
        features_BNF = gather_path(features_BNF, result.path_BE)
        hidden_BND = features_BNF if is_same else gather_path(hidden_BND, result.path_BE)
        logits_BNV = gather_path(logits_BNV, result.path_BE)
    emitted = Emitted(result.tokens_BE, result.num_accepted_B + 1, features_BNF)
    after = commit(loaded=loaded, state=rows.state, key=key, result=result, emitted=emitted)
    return StepOutput(
        outcome=outcome, emitted=emitted, hidden_BED=hidden_BND, logits_BEV=logits_BNV, state=after
    )


def _tree(shape: StepShape, drafts: Drafts) -> Tree | None:
    """Return the tree of all rows, or None if drafts are chains."""
    if drafts.parents_BN is not None:
        return build_tree(drafts.parents_BN, shape.draft_shape.depth)
    return None if shape.tree is None else shape.tree.expand(len(drafts.tokens_BN))


def verify_input(
    loaded: LoadedModel, rows: RowTensors, drafts: Drafts, logits_BNV: Tensor, tree: Tree | None
) -> VerifyInput:
    """Build the input of the acceptance rules, from the main model's logits."""
    state = rows.state
    sampling = rows.sampling
    acceptance = rows.acceptance
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
    drafter: Drafter, caches: Caches, rows: RowTensors, key: StepKey, draft_shape: DraftShape
) -> Drafts:
    """Call the drafter for the selected ``rows`` and return its drafts."""
    state = rows.state
    assert rows.rows_B is not None, "rows must be selected before drafting"
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
    return drafter.draft(
        state=state.drafter,
        context=context,
        draft_shape=draft_shape,
        catch_up_width=key.catch_up,
        caches=caches,
    )


def verify(
    loaded: LoadedModel, caches: Caches, rows: RowTensors, drafts: Drafts, tree: Tree | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the main model over the last token and the drafts of each row.

    The nodes of a tree occupy the slots after the context in node order. Each node attends to the
    context and to its own path.

    Returns:
        Hidden states [B, N1, D], drafter features [B, N1, F] and logits [B, N1, V].
    """
    slots = verify_slots(rows.state.num_known_B, drafts.tokens_BN.shape[1])
    positions_BQ = slots
    context_lens_BQ = slots + 1
    if tree is not None:
        positions_BQ, context_lens_BQ = slots[:, :1] + tree.depth_BQ, slots[:, :1].expand_as(slots)
    page_size = caches[MAIN][0].shape[1]
    batch = Batch(
        token_ids_BQ=torch.cat((rows.state.last_B1, drafts.tokens_BN), 1),
        positions_BQ=positions_BQ,
        write_slots_BQ=physical_slots(
            page_table_BP=rows.page_table_BP, slots_BQ=slots, keep_BQ=None, page_size=page_size
        ),
        context_lens_BQ=context_lens_BQ,
        page_table_BP=rows.page_table_BP,
        real_BQ=rows.real_B.unsqueeze(1).expand_as(slots),
        bits_BQ=None if tree is None else tree.bits_BQ,
    )
    network = loaded.network
    drafter = loaded.drafter
    hidden_BND, features_BNF = network.forward_with_taps(batch, caches, drafter.taps)
    if not drafter.num_features:
        features_BNF = features_BNF[..., :0]
    return hidden_BND, features_BNF, network.logits(hidden_BND)


def verify_slots(num_known_B: Tensor, num_drafts: int) -> Tensor:
    """Return the slots [B, N1] of the last known token and of the drafts in the main cache.

    Slots count from the start of the sequence. For a chain they equal the positions.
    """
    offsets = torch.arange(num_drafts + 1, device=num_known_B.device)
    return (num_known_B - 1).unsqueeze(1) + offsets


def move_path(
    loaded: LoadedModel, caches: list[Tensor], rows: RowTensors, result: VerifyResult
) -> None:
    """Copy the cache entries of accepted drafts to the slots that a chain would have used.

    Later steps overwrite the tree's other entries, which come after these slots.
    """
    assert result.path_BE is not None
    start_B1 = (rows.state.num_known_B - 1).unsqueeze(1)
    page_size = caches[0].shape[1]
    depth_E = torch.arange(1, result.path_BE.shape[1], device=start_B1.device)
    keep_BE = depth_E <= result.num_accepted_B.unsqueeze(1)
    from_BE, to_BE = (
        physical_slots(
            page_table_BP=rows.page_table_BP,
            slots_BQ=start_B1 + offsets,
            keep_BQ=keep_BE,
            page_size=page_size,
        )
        for offsets in (result.path_BE[:, 1:], depth_E)
    )
    loaded.kernels.copy_slots(caches, from_BE, to_BE)


def gather_path(x_BNX: Tensor, path_BE: Tensor) -> Tensor:
    """Gather the values [B, E, X] at the nodes of each row's accepted path."""
    return x_BNX.gather(1, path_BE.unsqueeze(2).expand(-1, -1, x_BNX.shape[2]))


def commit(
    loaded: LoadedModel, state: RowState, key: StepKey, result: VerifyResult, emitted: Emitted
) -> RowState:
    """Return the row state after the emitted tokens.

    Cache slots past the new length are overwritten by later steps. The drafter updates its own
    state.
    """
    drafter = loaded.drafter
    think_ids = loaded.think_ids
    return RowState(
        last_B1=result.tokens_BE.gather(1, result.num_accepted_B.unsqueeze(1)),
        num_known_B=state.num_known_B + emitted.num_B,
        num_output_B=state.num_output_B + emitted.num_B,
        thinking_B=phase_after(
            thinking_B=state.thinking_B,
            tokens_BM=emitted.tokens_BE,
            num_emitted_B=emitted.num_B,
            think_ids=think_ids,
        ),
        drafter=drafter.commit(state.drafter, emitted, key.catch_up),
    )
