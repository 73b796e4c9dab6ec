"""Medusa (arXiv 2401.10774; spec §8): heads on the main model's last hidden state, each of which
predicts one token further. Chains, or a static tree over the likeliest tokens of each head.

Shape legend: B rows, E places that a row may emit, H heads, K ranks, N drafts, F = D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.core.config import SpeculationConfig
from tandem.core.levels import Level, Levels, chains, prefixes
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.base import Drafter, Drafts, Emitted, View
from tandem.model.drafters.choices import Choice, orders_of, parents_of, read_choices
from tandem.model.drafters.medusa_heads import MedusaHead, read_heads
from tandem.model.kernels.base import Kernels
from tandem.model.network.cache import Caches
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.layers import adopt
from tandem.model.network.tree import Tree

CHOICES = "choices.json"


@dataclass(frozen=True, slots=True)
class MedusaRows:
    """The hidden state of the token before the last known one."""

    hidden_BD: Tensor


class MedusaDrafter(Drafter):
    """Draft 1 is of head 1: the main model's own has given the last known token already."""

    name = "medusa"

    def __init__(
        self, heads: list[MedusaHead], choices: Sequence[Choice], size: int, device: torch.device
    ) -> None:
        self.heads, self._choices, self._device = nn.ModuleList(heads), choices, device
        self.num_features = size
        self._ranks: dict[Level, tuple[int, Tensor]] = {}
        """How many of each head are looked at, and where among [H, K] the drafts of a level are, as
        likely ones and as drawn ones [2, N]: of those none may be left out."""

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, asked: SpeculationConfig
    ) -> "MedusaDrafter":
        """Raises ValueError for a folder without heads of this model and choices that are none."""
        if asked.draft_model_path is None:
            raise ValueError(
                "speculation.draft_model_path: is null; name the folder of Medusa's heads"
            )
        if asked.medusa_choices is not None and asked.max_tree_nodes is None:
            raise ValueError(
                "speculation.medusa_choices: are of trees; say speculation.max_tree_nodes too"
            )
        heads = read_heads(asked.draft_model_path, checkpoint, network.lm_head)
        choices: Sequence[Choice] = [(0,) * depth for depth in range(1, len(heads) + 1)]
        if asked.max_tree_nodes is not None:
            choices = read_choices(asked.medusa_choices or asked.draft_model_path / CHOICES)[
                : asked.max_tree_nodes
            ]
        if deep := next((path for path in choices if len(path) > len(heads)), None):
            raise ValueError(
                f"speculation.medusa_choices: {[*deep]} where there are {len(heads)} heads"
            )
        used = heads if checkpoint.drafts else []
        return cls(used, choices, checkpoint.config.hidden_size, checkpoint.device)

    def adopt(self, kernels: Kernels) -> None:
        adopt(self.heads, kernels)

    def levels(self, most_depth: int) -> Levels:
        choices = [path for path in self._choices if len(path) <= most_depth]
        parents = parents_of(choices)
        is_chain = parents == (*range(len(choices)),)
        levels = chains(len(choices)) if is_chain else prefixes(parents)
        num_ranks = 1 + max((path[-1] for path in choices), default=0)
        first = [(len(path) - 1) * num_ranks for path in choices]
        places = torch.tensor([[path[-1] for path in choices], orders_of(choices)])
        places_2N = (places + torch.tensor(first)).long().to(self._device)
        self._ranks |= {one: (num_ranks, places_2N[:, : one.num_nodes]) for one in levels}
        return levels

    def begin(
        self, text: Sequence[int], features_F: Tensor, is_known: bool, most_depth: int
    ) -> MedusaRows:
        return MedusaRows(features_F.unsqueeze(0))

    def draft(
        self, own: MedusaRows, view: View, level: Level, amount: int, caches: Caches
    ) -> Drafts:
        none_B0 = view.last_B1[:, :0]
        if level.num_nodes == 0:
            return Drafts(none_B0)
        logits_BHV = torch.stack([head(own.hidden_BD) for head in self.heads[: level.depth]], 1)
        num_ranks, (likely_N, drawn_N) = self._ranks[level]
        if num_ranks == 1:
            return view.chained(level.depth, lambda i, _: logits_BHV[:, i])
        depth_BH = torch.arange(level.depth, device=none_B0.device).expand(len(none_B0), -1)
        nodes = Tree(depth_BH, depth_BH, torch.ones_like(depth_BH), level.depth)
        ranked = view.rank(logits_BHV, none_B0, nodes, num_ranks)
        found = ranked.tokens_BQK.flatten(1)
        tokens_BN = found.index_select(1, likely_N)
        if ranked.q_BQV is None or ranked.drawn_B is None:
            return Drafts(tokens_BN)
        drawn_BN = found.index_select(1, drawn_N)
        tokens_BN = torch.where(ranked.drawn_B.unsqueeze(1), drawn_BN, tokens_BN)
        return Drafts(tokens_BN, q_BNV=ranked.q_BQV.index_select(1, drawn_N // num_ranks))

    def commit(self, own: MedusaRows, emitted: Emitted, amount: int) -> MedusaRows:
        last_B11 = (emitted.num_B - 1).view(-1, 1, 1)
        at_B1F = last_B11.expand(-1, -1, emitted.features_BEF.shape[2])
        return MedusaRows(emitted.features_BEF.gather(1, at_B1F).squeeze(1))
