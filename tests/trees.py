"""Tree drafters for tests: a scripted tree, and MTP's chain hidden in a tree whose shape changes by
row and step."""

from itertools import product

import torch
from torch import Tensor

from tandem.core.draft_shapes import DraftShape, DraftShapes, chain_shapes
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.mtp_rows import MtpRows
from tandem.model.drafters.none import NoDrafter
from tandem.model.network.cache import Caches

Parents = tuple[int, ...]


def shapes(num_nodes: int) -> list[Parents]:
    """Return the parents of nodes 1, 2, ... for every tree of ``num_nodes`` drafts."""
    return list(product(*(range(node) for node in range(1, num_nodes + 1))))


def path_to(parents: Parents, node: int) -> list[int]:
    """Return the nodes on the path from the root to ``node``, without node 0."""
    path = []
    while node:
        path.append(node)
        node = parents[node - 1]
    return path[::-1]


def level_of(parents: Parents, is_dynamic: bool = False) -> DraftShape:
    depth = max((len(path_to(parents, node)) for node in range(len(parents) + 1)), default=0)
    return DraftShape(len(parents), depth, None if is_dynamic else parents)


class ScriptedTree(NoDrafter):
    """Drafts the right tokens on the path to each of ``ends`` in turn, and wrong ones elsewhere.
    Handles one row, whose ``answer`` follows ``num_prompt`` prompt tokens."""

    name = "scripted tree"

    def __init__(
        self, answer: list[int], num_prompt: int, parents: Parents, ends: list[int], *, fed: bool
    ) -> None:
        self.runs_on_host, self._num_prompt = fed, num_prompt  # type: ignore[misc]
        self._level = level_of(parents, fed)
        self._answer_T = torch.tensor(answer + [0] * 20)
        self._parents_1N = torch.tensor([parents])
        nodes = range(1, len(parents) + 1)
        self._depth_N = torch.tensor([len(path_to(parents, node)) for node in nodes])
        on = [[node in path_to(parents, end) for node in nodes] for end in ends]
        self._on_EN, self.num_steps = torch.tensor(on), torch.tensor([0])

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        return (*chain_shapes(0), self._level)

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        at_BN = (context.num_known_B - self._num_prompt - 1).unsqueeze(1) + self._depth_N
        right_BN = self._answer_T[at_BN.clamp(min=0)]
        is_on_BN = self._on_EN[self.num_steps % len(self._on_EN)].expand_as(right_BN)
        self.num_steps += 1
        tokens_BN = right_BN.where(is_on_BN, (right_BN + 1) % 90)
        parents_BN = self._parents_1N.expand_as(tokens_BN) if draft_shape.parents is None else None
        return Drafts(tokens_BN, parents_BN=parents_BN)


class HiddenChain(MtpDrafter):
    """Places MTP's drafts at some nodes of a tree. Other nodes hold random tokens at random places,
    also copies of the right ones."""

    name = "hidden chain"
    num_nodes, num_chain = 9, 3

    def draft_shapes(self, max_depth: int) -> DraftShapes:
        whole = DraftShape(self.num_nodes, self.num_nodes, None)
        return (*chain_shapes(0), DraftShape(4, 4, None), whole)

    def draft(
        self,
        state: MtpRows,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        if not draft_shape.num_nodes:
            return super().draft(state, context, draft_shape, catch_up_width, caches)
        chain_BC = (
            super()
            .draft(state, context, chain_shapes(self.num_chain)[-1], catch_up_width, caches)
            .tokens_BN
        )
        tokens_BN, parents_BN = hidden(chain_BC, context.num_known_B, self.num_nodes)
        num = draft_shape.num_nodes
        return Drafts(tokens_BN[:, :num].contiguous(), parents_BN=parents_BN[:, :num].contiguous())


def hidden(chain_BC: Tensor, seed_B: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return tokens and parents [B, N] of a tree that has the chain at nodes chosen by the
    seeds."""
    num_rows, num_chain = chain_BC.shape
    node_N = torch.arange(1, num_nodes + 1)
    mixed_BN = (seed_B.unsqueeze(1) * 7919 + node_N * 104729) % 10007
    at_BC = mixed_BN.argsort(1)[:, :num_chain].sort(1).values
    any_BN = chain_BC.gather(1, mixed_BN % num_chain)
    tokens_BN = torch.where(mixed_BN % 3 == 0, any_BN, mixed_BN % 90)
    tokens_BN = tokens_BN.scatter(1, at_BC, chain_BC)
    before_BC = torch.cat((torch.zeros(num_rows, 1, dtype=torch.int64), at_BC[:, :-1] + 1), 1)
    parents_BN = (mixed_BN // 7) % node_N
    return tokens_BN, parents_BN.scatter(1, at_BC, before_BC)
