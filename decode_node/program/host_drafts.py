"""Runs drafters with ``runs_on_host`` before a step's program and passes it their drafts.

If such a drafter raises, or returns tensors of a wrong shape, this rank's step runs without drafts.
Its sequences and the epoch are not affected. If the device is lost, or the drafter uses
collectives, the error is raised instead.
"""

import logging
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.draft_shapes import DraftShape
from tandem.core.request import REJECTION
from tandem.decode_node.planning.step_plan import StepKey
from tandem.decode_node.program.rows import RowTensors
from tandem.decode_node.program.step import draft
from tandem.model.drafters.base import Drafts
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import Caches
from tandem.runtime.engine_loop import is_device_lost

log = logging.getLogger(__name__)


class HostDraftRunner:
    """Runs a drafter on the host and checks its output.

    ``num_draftless_steps`` is the number of steps in which the drafter failed. The failures number
    1, 2, 4, 8 and so on are logged.
    """

    def __init__(self, loaded: LoadedModel, caches: Caches) -> None:
        self._loaded = loaded
        self._caches = caches
        self.num_draftless_steps = 0

    def draft_inputs(
        self, key: StepKey, draft_shape: DraftShape, rows: RowTensors
    ) -> tuple[Tensor, ...]:
        """Run the drafter and return its drafts as program inputs (see ``unpack_drafts``).

        The drafter's probabilities q are included if some row uses rejection sampling, unless all
        rows are greedy.
        """
        drafts = self._drafts(key, draft_shape, rows)
        assert drafts.num_B is not None
        inputs = [drafts.tokens_BN, drafts.num_B]
        if drafts.parents_BN is not None:
            inputs.append(drafts.parents_BN)
        if REJECTION in key.traits.rule_names and not key.traits.all_greedy:
            one_hot = partial(F.one_hot, drafts.tokens_BN, self._loaded.config.vocab_size)
            inputs.append(one_hot().float() if drafts.q_BNV is None else drafts.q_BNV)
        return (*inputs,)

    def _drafts(self, key: StepKey, draft_shape: DraftShape, rows: RowTensors) -> Drafts:
        none_B = torch.zeros_like(rows.state.num_output_B)
        none_BN = none_B.unsqueeze(1).repeat(1, draft_shape.num_nodes)
        none = Drafts(
            tokens_BN=none_BN,
            num_B=none_B,
            q_BNV=None,
            parents_BN=none_BN if draft_shape.parents is None else None,
        )
        try:
            # The drafter is not called in a step that neither drafts nor catches up.
            if draft_shape.num_nodes or key.catch_up:
                drafts = draft(
                    drafter=self._loaded.drafter,
                    caches=self._caches,
                    rows=rows,
                    key=key,
                    draft_shape=draft_shape,
                )
                return check_drafts(drafts, none, self._loaded.config.vocab_size)
        except Exception as error:
            if self._loaded.drafter.uses_collectives or is_device_lost(error):
                raise
            self.num_draftless_steps += 1
            if self.num_draftless_steps.bit_count() == 1:
                log.exception(
                    "drafting failed, so a step runs without drafts (%d such steps so far)",
                    self.num_draftless_steps,
                )
        return none


def unpack_drafts(draft_shape: DraftShape, inputs: tuple[Tensor, ...]) -> Drafts:
    """Rebuild Drafts from the tensors that ``draft_inputs`` returned for ``draft_shape``."""
    tokens_BN, num_B, *more = inputs
    parents_BN = more.pop(0) if draft_shape.parents is None else None
    return Drafts(
        tokens_BN=tokens_BN, num_B=num_B, q_BNV=more[0] if more else None, parents_BN=parents_BN
    )


def check_drafts(drafts: Drafts, like: Drafts, vocab_size: int) -> Drafts:
    """Return ``drafts`` with valid values, on the device of ``like``.

    Token ids, parents and numbers of drafts are clamped to their valid ranges. Raises ValueError if
    a tensor has another shape than ``like`` requires, or should be absent.
    """
    like_BN, (num_rows, num_drafts) = like.tokens_BN, like.tokens_BN.shape
    tokens_BN = drafts.tokens_BN
    num_B = drafts.num_B
    q_BNV = drafts.q_BNV
    parents_BN = drafts.parents_BN
    num_B = like_BN.new_full((num_rows,), num_drafts) if num_B is None else num_B
    tensors = (tokens_BN, num_B, q_BNV, parents_BN)
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in tensors]
    expected_shapes = [
        (num_rows, num_drafts),
        (num_rows,),
        None if q_BNV is None else (num_rows, num_drafts, vocab_size),
        None if like.parents_BN is None else (num_rows, num_drafts),
    ]
    if shapes != expected_shapes:
        raise ValueError(f"the drafter returned shapes {shapes}, expected {expected_shapes}")
    if parents_BN is not None:
        latest_N = torch.arange(num_drafts, device=like_BN.device)
        parents_BN = parents_BN.to(like_BN).clamp(min=0).minimum(latest_N)
    return Drafts(
        tokens_BN=tokens_BN.to(like_BN).clamp(0, vocab_size - 1),
        num_B=num_B.to(like_BN).clamp(0, num_drafts),
        q_BNV=None if q_BNV is None else q_BNV.to(like_BN.device).float(),
        parents_BN=parents_BN,
    )
