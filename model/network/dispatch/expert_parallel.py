"""Base class of the dispatch methods for several ranks: expert slots, payloads and counts.

Shape legend: T tokens of this rank, N received tokens, K experts per token, P (token, expert)
pairs computed here, D hidden, R ranks, L MoE layers, E experts, C maximum replicas of an expert.
"""

from itertools import zip_longest

import torch
from torch import Tensor

from tandem.core.placement import Placement
from tandem.model.network.dispatch.base import CollectiveGroup, Dispatch
from tandem.model.network.experts import Experts

PADDING_SLOT = -1
"""Slot of padding tokens, which no rank computes."""


class ExpertParallelDispatch(Dispatch):
    """Dispatch between the ranks of a gang, whose experts are spread by ``placement``."""

    placement: Placement
    eager_reason = "ranks exchange tokens"

    def __init__(self, placement: Placement, rank: int, device: torch.device) -> None:
        self._group: CollectiveGroup | None = None
        self.num_slots = placement.slots_per_rank
        self.placement = placement
        self._rank = rank
        tables = [
            _replicas(placement.expert_slots(layer)) for layer in range(len(placement.slot_experts))
        ]
        self._slots = [table.to(device) for table, _ in tables]
        self._num = [num.to(device) for _, num in tables]
        num_experts = len(placement.expert_slots(0))
        self._sent_LE = torch.zeros(len(tables), num_experts, dtype=torch.int64, device=device)
        self._computed_L = torch.zeros(len(tables), dtype=torch.int64, device=device)
        # A copy of the flag is on the device, because a captured graph cannot read one on the host.
        self._is_counting = True
        self._is_counting_1 = torch.ones(1, dtype=torch.int64, device=device)

    @property
    def is_counting(self) -> bool:
        return self._is_counting

    @is_counting.setter
    def is_counting(self, value: bool) -> None:
        if value != self._is_counting:
            self._is_counting_1.fill_(int(value))
        self._is_counting = value

    def local_experts(self, layer: int) -> tuple[int, ...]:
        return self.placement.experts_of_rank(layer, self._rank)

    def set_group(self, group: CollectiveGroup | None) -> None:
        self._group = group

    def num_sent_rows(self) -> list[list[int]]:
        return self._sent_LE.tolist()

    def num_computed_rows(self) -> list[int]:
        return self._computed_L.tolist()

    @property
    def group(self) -> CollectiveGroup:
        assert self._group is not None, "collectives need a running epoch of the gang"
        return self._group

    def slots(self, layer: int, ids_TK: Tensor, real_T: Tensor | None) -> Tensor:
        """Return slots [T, K] of the chosen experts, PADDING_SLOT for padding, and count the rows.

        Successive tokens use the replicas of an expert in turn.
        """
        turns_T1 = torch.arange(self._rank, self._rank + len(ids_TK), device=ids_TK.device)[:, None]
        slots_TK = self._slots[layer][ids_TK, turns_T1 % self._num[layer][ids_TK]]
        real_TK = torch.ones_like(ids_TK)
        if real_T is not None:
            slots_TK = slots_TK.where(real_T.unsqueeze(1), PADDING_SLOT)
            real_TK = real_T.unsqueeze(1).expand_as(ids_TK).long()
        counted_TK = real_TK * self._is_counting_1
        self._sent_LE[layer].scatter_add_(0, ids_TK.flatten(), counted_TK.flatten())
        return slots_TK

    def local_slots(self, layer: int, slots_NK: Tensor) -> Tensor:
        """Return slots relative to this rank's first slot; those of other ranks become
        ``num_slots``.

        Also counts the rows that this rank computes.
        """
        mine_NK = slots_NK - self._rank * self.num_slots
        is_mine = (mine_NK >= 0) & (mine_NK < self.num_slots)
        self._computed_L[layer] += is_mine.sum() * self._is_counting_1[0]
        return mine_NK.where(is_mine, self.num_slots)

    def compute_and_return(
        self,
        layer: int,
        experts: Experts,
        payload_NB: Tensor,
        num_from_R: list[int],
        x_TD: Tensor,
        slots_TK: Tensor,
    ) -> Tensor:
        """Run the experts on the received tokens and return the outputs to the sending ranks.

        Sender and receiver order pairs by token, then by position in K. Each can thus derive from
        the slots how many outputs it sends and receives. The host waits for these numbers.

        Args:
            layer: Index among the MoE layers.
            experts: The layer's experts on this rank.
            payload_NB: Received tokens and slots (``pack_payload``).
            num_from_R: Number of tokens received from each rank.
            x_TD: Tokens of this rank.
            slots_TK: Slots of this rank's tokens.

        Returns:
            Outputs [T, K, D] of this rank's tokens, zeros for padding.
        """
        x_ND, slots_NK = unpack_payload(payload_NB, x_TD, slots_TK.shape[1])
        local_NK = self.local_slots(layer, slots_NK)
        pairs_P = (local_NK < self.num_slots).flatten().nonzero().squeeze(1)
        tokens_P = pairs_P // slots_TK.shape[1]
        out_PD = experts(x_ND, tokens_P, local_NK.flatten()[pairs_P])
        num_back = [int((part_NK < self.num_slots).sum()) for part_NK in local_NK.split(num_from_R)]
        owner_of, order = (slots_TK // self.num_slots).flatten().sort(stable=True)
        order = order[owner_of >= 0]
        num_due = torch.bincount(owner_of[owner_of >= 0], minlength=len(num_from_R)).tolist()
        back_PD = self.group.all_to_all(out_PD, num_back, num_due)
        out = x_TD.new_zeros(slots_TK.numel(), x_TD.shape[1])
        return out.index_copy_(0, order, back_PD).view(*slots_TK.shape, x_TD.shape[1])


def pack_payload(x_TD: Tensor, slots_TK: Tensor) -> Tensor:
    """Pack tokens and their slots as bytes [T, B], so that one collective sends both."""
    return torch.cat((x_TD.view(torch.uint8), slots_TK.int().view(torch.uint8)), 1)


def unpack_payload(
    payload_NB: Tensor, like_TD: Tensor, num_per_token: int
) -> tuple[Tensor, Tensor]:
    """Unpack tokens [N, D] and slots [N, K]."""
    num_bytes = payload_NB.shape[1] - 4 * num_per_token
    x_NB, slots_NB = payload_NB.split([num_bytes, 4 * num_per_token], 1)
    slots_NK = slots_NB.contiguous().view(torch.int32).long()
    return x_NB.contiguous().view(like_TD.dtype), slots_NK


def _replicas(slots_of: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """Return the slots of each expert [E, C], padded, and the number of its slots [E]."""
    table = torch.tensor(list(zip_longest(*slots_of, fillvalue=0))).T.contiguous()
    return table, torch.tensor([len(slots) for slots in slots_of])
