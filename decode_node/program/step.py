"""One decode step as functions over tensors: draft, verify, judge, commit (design.md).

Shapes depend only on (rows, level, pages) and nothing inside waits for the host.
Shape legend: B rows, N drafts, N1 = N + 1 places of a chain or nodes of a tree, E places that a row
may emit (N1 of a chain), D hidden, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.levels import Level
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.rows import RowState, RowTensors
from tandem.model.drafters.base import Drafter, Drafts, Emitted, View
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch, physical_slots
from tandem.model.network.cache import MAIN, Caches
from tandem.model.network.tree import Tree, tree_of
from tandem.model.sampling.acceptance import judge, pick_draft, rank_drafts
from tandem.model.sampling.acceptance.base import Evidence, Outcome, Verdict
from tandem.model.sampling.sampler import adjusted_places, draw_places
from tandem.model.sampling.thinking import phase_after


class Shape(NamedTuple):
    """A level, and the tree of one row if that is known before a step and no chain."""

    level: Level
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
    shape: Shape,
    fed: Drafts | None = None,
) -> StepOutput:
    """Advance every row by its accepted drafts plus one token of the main model's own. Drafts that
    are not ``fed`` are made here."""
    assert (rows.sampling.rules is not None) == key.extras.has_rules, "rules come if a row has some"
    drafts = draft(loaded.drafter, caches, rows, key, shape.level) if fed is None else fed
    tree = _tree(shape, drafts)
    hidden_BND, features_BNF, logits_BNV = verify(loaded, caches, rows, drafts, tree)
    found = evidence(loaded, rows, drafts, logits_BNV, tree)
    verdict = judge(key.extras.kinds, found)
    outcome = Outcome.of(verdict, rows.sampling.sampler.are_finite(found.adjusted_BN1V))
    if verdict.path_BE is not None:
        move_path(loaded, caches[MAIN], rows, verdict)
        is_same, features_BNF = features_BNF is hidden_BND, along(features_BNF, verdict.path_BE)
        hidden_BND = features_BNF if is_same else along(hidden_BND, verdict.path_BE)
        logits_BNV = along(logits_BNV, verdict.path_BE)
    emitted = Emitted(verdict.tokens_BE, verdict.num_accepted_B + 1, features_BNF)
    after = commit(loaded, rows.state, key, verdict, emitted)
    return StepOutput(outcome, emitted, hidden_BND, logits_BNV, after)


def _tree(shape: Shape, drafts: Drafts) -> Tree | None:
    """Of all rows, None where drafts are chains."""
    if drafts.parents_BN is not None:
        return tree_of(drafts.parents_BN, shape.level.depth)
    return None if shape.tree is None else shape.tree.expand(len(drafts.tokens_BN))


def evidence(
    loaded: LoadedModel, rows: RowTensors, drafts: Drafts, logits_BNV: Tensor, tree: Tree | None
) -> Evidence:
    """What drafts are judged by."""
    state, sampling, acceptance = rows.state, rows.sampling, rows.acceptance
    if drafts.num_B is not None and tree is None:
        acceptance = replace(acceptance, limit_B=acceptance.limit_B.minimum(drafts.num_B))
    rest = sampling, state.num_output_B
    adjusted_BNV = adjusted_places(logits_BNV, *rest, drafts.tokens_BN, tree)
    return Evidence(
        drafts_BN=drafts.tokens_BN,
        q_BNV=drafts.q_BNV,
        adjusted_BN1V=adjusted_BNV,
        targets_BN1=draw_places(adjusted_BNV, *rest, tree),
        sampling=sampling,
        acceptance=acceptance,
        num_output_B=state.num_output_B,
        thinking_B=state.thinking_B,
        think_ids=loaded.think_ids,
        tree=tree,
        num_B=drafts.num_B,
    )


def draft(drafter: Drafter, caches: Caches, rows: RowTensors, key: StepKey, level: Level) -> Drafts:
    """The drafter's part of a step."""
    state = rows.state
    assert rows.rows_B is not None, "rows are selected"
    kinds = key.extras.kinds, rows.acceptance.kind_B
    sampling = rows.sampling, state.num_output_B
    known = state.last_B1, state.num_known_B, rows.page_table_BP, rows.real_B
    view = View(
        *known,
        *(rows.rows_B, rows.memory),
        pick=lambda logits_BV, drafts_BN: pick_draft(*kinds, logits_BV, *sampling, drafts_BN),
        rank=lambda logits_BQV, *of: rank_drafts(*kinds, logits_BQV, *sampling, *of),
    )
    return drafter.draft(state.drafter, view, level, key.catch_up, caches)


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
    hidden_BND, features_BNF = network.tapped(batch, caches, drafter.taps)
    if not drafter.num_features:
        features_BNF = features_BNF[..., :0]
    return hidden_BND, features_BNF, network.logits(hidden_BND)


def verify_slots(num_known_B: Tensor, num_drafts: int) -> Tensor:
    """Main-model slots [B, N1] of the last token and its drafts; of a chain positions, too."""
    offsets = torch.arange(num_drafts + 1, device=num_known_B.device)
    return (num_known_B - 1).unsqueeze(1) + offsets


def move_path(
    loaded: LoadedModel, caches: list[Tensor], rows: RowTensors, verdict: Verdict
) -> None:
    """Entries of accepted drafts go to where a chain would have put them; what is left of the tree
    behind them is written again later."""
    assert verdict.path_BE is not None
    begin_B1, page_size = (rows.state.num_known_B - 1).unsqueeze(1), caches[0].shape[1]
    depth_E = torch.arange(1, verdict.path_BE.shape[1], device=begin_B1.device)
    keep_BE = depth_E <= verdict.num_accepted_B.unsqueeze(1)
    from_BE, to_BE = (
        physical_slots(rows.page_table_BP, begin_B1 + offsets, keep_BE, page_size)
        for offsets in (verdict.path_BE[:, 1:], depth_E)
    )
    loaded.kernels.move(caches, from_BE, to_BE)


def along(x_BNX: Tensor, path_BE: Tensor) -> Tensor:
    """What stands at the nodes of each row's path: [B, E, X]."""
    return x_BNX.gather(1, path_BE.unsqueeze(2).expand(-1, -1, x_BNX.shape[2]))


def commit(
    loaded: LoadedModel, state: RowState, key: StepKey, verdict: Verdict, emitted: Emitted
) -> RowState:
    """Lengths advance by what was emitted. Cache slots past the new length are simply written again
    later; what the drafter keeps of the step is its own affair."""
    drafter, think_ids = loaded.drafter, loaded.think_ids
    return RowState(
        last_B1=verdict.tokens_BE.gather(1, verdict.num_accepted_B.unsqueeze(1)),
        num_known_B=state.num_known_B + emitted.num_B,
        num_output_B=state.num_output_B + emitted.num_B,
        thinking_B=phase_after(state.thinking_B, emitted.tokens_BE, emitted.num_B, think_ids),
        drafter=drafter.commit(state.drafter, emitted, key.catch_up),
    )
