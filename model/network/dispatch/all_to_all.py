"""Dispatch by all-to-all: a token is sent once to each rank that holds some of its experts.

Takes three collectives per layer. The first exchanges token counts, and the host waits for it.
Ranks may have different numbers of tokens.
Shape legend: T tokens of this rank, N received tokens, K experts per token, D hidden, R ranks.
"""

import torch
from torch import Tensor

from tandem.model.network.dispatch.expert_parallel import ExpertParallelDispatch, pack_payload
from tandem.model.network.experts import Experts


class AllToAllDispatch(ExpertParallelDispatch):
    pads_tokens = False

    def run_experts(
        self, layer: int, experts: Experts, x_TD: Tensor, ids_TK: Tensor, real_T: Tensor | None
    ) -> Tensor:
        slots_TK = self.slots(layer, ids_TK, real_T)
        ranks_R1 = torch.arange(self.group.num_ranks, device=x_TD.device)[:, None]
        goes_RT = torch.stack([(slots_TK // self.num_slots == rank).any(1) for rank in ranks_R1])
        num_to_R = goes_RT.sum(1)
        num_from_R = self.group.all_to_all(num_to_R).tolist()
        sent = pack_payload(x_TD, slots_TK)[goes_RT.nonzero()[:, 1]]
        payload_NB = self.group.all_to_all(sent, num_to_R.tolist(), num_from_R)
        return self.compute_and_return(
            layer=layer,
            experts=experts,
            payload_NB=payload_NB,
            num_from_R=num_from_R,
            x_TD=x_TD,
            slots_TK=slots_TK,
        )
