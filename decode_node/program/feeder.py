"""Drafts of a fed drafter, made before a step's program and given to it: what the drafter raises,
or gives in a wrong shape, costs this rank the drafts of that step, neither rows nor the epoch."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from core.request import REJECTION
from decode_node.planning.step_plan import StepKey
from decode_node.program.rows import RowTensors
from decode_node.program.step import draft
from model.drafters.base import Drafts
from model.loaded import LoadedModel
from model.network.cache import Caches
from runtime.engine_loop import is_device_lost

log = logging.getLogger(__name__)
Fed = tuple[Tensor, Tensor, Tensor | None]
"""Drafts of which every row has a number."""


class Feeder:
    """``num_lost`` counts the steps that had no drafts of a drafter that should have given some;
    each is logged whose number is a power of two."""

    def __init__(self, loaded: LoadedModel, caches: Caches) -> None:
        self._loaded, self._caches = loaded, caches
        self.num_lost = 0

    def feed(self, key: StepKey, rows: RowTensors) -> tuple[Tensor, ...]:
        """Inputs of the program, as Drafts has them: tokens [B, N], how many of each row are any
        [B], and what they were drawn from [B, N, V] where a kind of acceptance asks for that."""
        tokens_BN, num_B, q_BNV = self._drafts(key, rows)
        if key.extras.all_greedy or REJECTION not in key.extras.kinds:
            return tokens_BN, num_B
        if q_BNV is None:
            q_BNV = F.one_hot(tokens_BN, self._loaded.config.vocab_size).float()
        return tokens_BN, num_B, q_BNV

    def _drafts(self, key: StepKey, rows: RowTensors) -> Fed:
        none_B = torch.zeros_like(rows.state.num_output_B)
        none_BN = none_B.unsqueeze(1).repeat(1, key.num_drafts)
        try:
            if key.num_drafts or key.catch_up:  # it has a part in the step
                drafts = draft(self._loaded.drafter, self._caches, rows, key)
                return fitted(drafts, none_BN, self._loaded.config.vocab_size)
        except Exception as error:
            if self._loaded.drafter.meets_ranks or is_device_lost(error):
                raise
            self.num_lost += 1
            if self.num_lost.bit_count() == 1:
                log.exception("a step goes on without drafts, the %d. one", self.num_lost)
        return none_BN, none_B, None


def fitted(drafts: Drafts, like_BN: Tensor, vocab_size: int) -> Fed:
    """Where ``like_BN`` is, every id a token and no row of more drafts than there are. Raises
    ValueError when something is of another shape."""
    (num_rows, num_drafts), (tokens_BN, num_B, q_BNV) = like_BN.shape, drafts
    num_B = like_BN.new_full((num_rows,), num_drafts) if num_B is None else num_B
    given = [tuple(one.shape) for one in (tokens_BN, num_B, q_BNV) if one is not None]
    wanted = [(num_rows, num_drafts), (num_rows,), (num_rows, num_drafts, vocab_size)]
    if given != wanted[: len(given)]:
        raise ValueError(f"drafts have the shapes {given} where {wanted} are taken")
    tokens_BN = tokens_BN.to(like_BN).clamp(0, vocab_size - 1)
    num_B = num_B.to(like_BN).clamp(0, num_drafts)
    return tokens_BN, num_B, None if q_BNV is None else q_BNV.to(like_BN.device).float()
