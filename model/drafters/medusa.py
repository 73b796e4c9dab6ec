"""Medusa (arXiv 2401.10774): heads on the main model's last hidden state, each of which predicts
one token further. Drafts chains, or a static tree over the most likely tokens of each head.

Shape legend: B rows, E tokens that a row may emit, H heads, K tokens per head, N drafts, F = D
hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes, static_tree_shapes
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.base import DraftContext, Drafter, Drafts, Emitted
from tandem.model.drafters.choices import Choice, parents_of, read_choices, sibling_orders
from tandem.model.drafters.medusa_heads import MedusaHead, read_heads
from tandem.model.kernels.base import Kernels
from tandem.model.network.cache import Caches
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.layers import process_weights_after_loading
from tandem.model.network.tree import Tree

CHOICES_FILE = "choices.json"


@dataclass(frozen=True, slots=True)
class MedusaRows:
    """State of B rows: the hidden state of the token before the last known one."""

    hidden_BD: Tensor


class MedusaDrafter(Drafter):
    """Medusa heads as a drafter.

    Head 1 yields draft 1, because the main model's own head has already yielded the last known
    token.
    """

    name = "medusa"

    def __init__(
        self, heads: list[MedusaHead], choices: Sequence[Choice], size: int, device: torch.device
    ) -> None:
        """Create the drafter. ``choices`` are the paths of the tree (choices.py), ``size`` is the
        hidden size."""
        self.heads = nn.ModuleList(heads)
        self._choices = choices
        self._device = device
        self.num_features = size
        self._candidate_slots: dict[DraftShape, tuple[int, Tensor]] = {}
        """For each draft shape: the number K of candidates per head, and indices [2, N] of the
        shape's drafts among the H * K candidates. Row 0 is for candidates in order of likelihood
        and uses the ranks in the paths. Row 1 is for sampled candidates, of which siblings take the
        first ones."""

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> "MedusaDrafter":
        """Load the heads from ``speculation.draft_model_path``.

        Raises ValueError if that folder has no heads for this model, or if the choices are invalid.
        """
        if spec_config.draft_model_path is None:
            raise ValueError(
                "speculation.draft_model_path: is null; name the folder of Medusa's heads"
            )
        if spec_config.medusa_choices is not None and spec_config.max_tree_nodes is None:
            raise ValueError(
                "speculation.medusa_choices: only used for trees; also set "
                "speculation.max_tree_nodes"
            )
        heads = read_heads(spec_config.draft_model_path, checkpoint, network.lm_head)
        choices: Sequence[Choice] = [(0,) * depth for depth in range(1, len(heads) + 1)]
        if spec_config.max_tree_nodes is not None:
            choices = read_choices(
                spec_config.medusa_choices or spec_config.draft_model_path / CHOICES_FILE
            )[: spec_config.max_tree_nodes]
        if deep := next((path for path in choices if len(path) > len(heads)), None):
            raise ValueError(
                f"speculation.medusa_choices: path {[*deep]} needs {len(deep)} heads, but the file "
                f"has {len(heads)}; shorten the path"
            )
        used = heads if checkpoint.may_draft else []
        return cls(used, choices, checkpoint.config.hidden_size, checkpoint.device)

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        process_weights_after_loading(self.heads, kernels)

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        choices = [path for path in self._choices if len(path) <= max_depth]
        parents = parents_of(choices)
        is_chain = parents == (*range(len(choices)),)
        shapes = chain_shapes(len(choices)) if is_chain else static_tree_shapes(parents)
        num_candidates = 1 + max((path[-1] for path in choices), default=0)
        first = [(len(path) - 1) * num_candidates for path in choices]
        places = torch.tensor([[path[-1] for path in choices], sibling_orders(choices)])
        places_2N = (places + torch.tensor(first)).long().to(self._device)
        self._candidate_slots |= {
            shape: (num_candidates, places_2N[:, : shape.num_nodes]) for shape in shapes
        }
        return shapes

    def init_state(
        self, text: Sequence[int], features_F: Tensor, has_features: bool, max_depth: int
    ) -> MedusaRows:
        return MedusaRows(features_F.unsqueeze(0))

    def draft(
        self,
        state: MedusaRows,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        none_B0 = context.last_B1[:, :0]
        if draft_shape.num_nodes == 0:
            return Drafts(none_B0)
        logits_BHV = torch.stack(
            [head(state.hidden_BD) for head in self.heads[: draft_shape.depth]], 1
        )
        num_candidates, (likely_N, drawn_N) = self._candidate_slots[draft_shape]
        if num_candidates == 1:
            return context.draft_chain(draft_shape.depth, lambda i, _: logits_BHV[:, i])
        depth_BH = torch.arange(draft_shape.depth, device=none_B0.device).expand(len(none_B0), -1)
        nodes = Tree(
            parent_BQ=depth_BH,
            depth_BQ=depth_BH,
            bits_BQ=torch.ones_like(depth_BH),
            depth=draft_shape.depth,
        )
        top = context.top_candidates(logits_BHV, none_B0, nodes, num_candidates)
        found = top.tokens_BQK.flatten(1)
        tokens_BN = found.index_select(1, likely_N)
        if top.q_BQV is None or top.drawn_B is None:
            return Drafts(tokens_BN)
        drawn_BN = found.index_select(1, drawn_N)
        tokens_BN = torch.where(top.drawn_B.unsqueeze(1), drawn_BN, tokens_BN)
        return Drafts(tokens_BN, q_BNV=top.q_BQV.index_select(1, drawn_N // num_candidates))

    def commit(self, state: MedusaRows, emitted: Emitted, catch_up_width: int) -> MedusaRows:
        last_B11 = (emitted.num_B - 1).view(-1, 1, 1)
        at_B1F = last_B11.expand(-1, -1, emitted.features_BEF.shape[2])
        return MedusaRows(emitted.features_BEF.gather(1, at_B1F).squeeze(1))
