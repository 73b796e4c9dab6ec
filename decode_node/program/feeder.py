"""Drafts of a fed drafter, made before a step's program and given to it: what the drafter raises
costs this rank the drafts of that step, neither rows nor the gang's epoch."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from core.request import REJECTION
from decode_node.planning.step_plan import StepKey
from decode_node.program.rows import RowTensors
from decode_node.program.step import draft
from model.cache import Caches
from model.drafters.base import Drafts
from model.loaded import LoadedModel
from runtime.engine_loop import is_fatal

log = logging.getLogger(__name__)


class Feeder:
    """``num_lost`` counts the steps that had no drafts of a drafter that should have given some."""

    def __init__(self, loaded: LoadedModel, caches: Caches) -> None:
        self._loaded, self._caches = loaded, caches
        self.num_lost = 0

    def feed(self, key: StepKey, rows: RowTensors) -> tuple[Tensor, ...]:
        """Inputs of the program, as Drafts has them: tokens [B, N], how many of each row are any
        [B], and what they were drawn from [B, N, V] where a kind of acceptance asks for that."""
        tokens_BN, num_B, q_BNV = self._drafts(key, rows)
        if num_B is None:
            num_B = torch.full_like(rows.state.num_output_B, key.num_drafts)
        if key.extras.all_greedy or REJECTION not in key.extras.kinds:
            return tokens_BN, num_B
        if q_BNV is None:
            q_BNV = F.one_hot(tokens_BN, self._loaded.config.vocab_size).float()
        return tokens_BN, num_B, q_BNV

    def _drafts(self, key: StepKey, rows: RowTensors) -> Drafts:
        if not key.drafts:
            return Drafts(rows.state.last_B1[:, :0])
        try:
            return draft(self._loaded.drafter, self._caches, rows, key)
        except Exception as error:
            if self._loaded.drafter.meets_ranks or is_fatal(error):
                raise
            log.exception("a step goes on without drafts")
            self.num_lost += 1
            num_B = torch.zeros_like(rows.state.num_output_B)
            return Drafts(num_B.unsqueeze(1).repeat(1, key.num_drafts), num_B)
