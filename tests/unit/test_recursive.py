"""Rejection over trees is lossless: tests of the joint distribution of several tokens over many
steps, for every way of drafting trees. Deliberately wrong rules are detected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tandem.core.request import REJECTION, REJECTION_GREEDY, STRICT, SamplingParams
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.drafters.beams import expand_beam, next_beam, root_beam, select_tree
from tandem.model.drafters.medusa import MedusaDrafter, MedusaRows
from tandem.model.drafters.merged import merge_chains
from tandem.model.sampling import ranking
from tandem.model.sampling.acceptance import ACCEPTANCE_RULES, RULE_NUMBERS, recursive
from tandem.model.sampling.ranking import TopCandidates
from tests.markov import VOCAB, Drafting, World, chain, check_tokens, tell
from tests.unit.test_rejection import PLAIN, SETTINGS, WORLD, limits

NUM_ROWS, MANY_ROWS = 12_000, 30_000
"""Number of rows in every run, and in ``make soak``."""
DEPTH, TOP_K = 3, 3
CHOICES_FILE = [(0,), (2,), (1,), (0, 0), (0, 2), (2, 0), (0, 2, 0), (0, 2, 1)]
"""A tree with holes: no (0, 1) before (0, 2)."""


def beam(num_nodes: int) -> Drafting:
    """Draft by beam search, as MTP trees do. The previous token replaces the hidden state."""

    def draft(world: World, context: DraftContext) -> Drafts:
        at = root_beam(context.last_B1.float())
        found = []
        for depth in range(DEPTH):
            if depth:
                at = next_beam(at, found)
                at = at._replace(hidden_BKD=at.drafts_BM[:, -TOP_K:].unsqueeze(2).float())
            logits_BKV = world.drafter_VV[at.hidden_BKD.squeeze(2).long()]
            found.append(
                expand_beam(at, context.top_candidates(logits_BKV, at.drafts_BM, at.nodes, TOP_K))
            )
        return select_tree(found, num_nodes)

    return draft


class Head(nn.Module):
    def __init__(self, logits_VV: Tensor) -> None:
        super().__init__()
        self.logits_VV = logits_VV

    def forward(self, hidden_BD: Tensor) -> Tensor:
        return self.logits_VV[hidden_BD[:, 0].long()]


def static(world: World, context: DraftContext) -> Drafts:
    """Draft a static tree with Medusa heads, which do not know the path."""
    heads: list = [Head(world.drafter_VV.roll(k, 1)) for k in range(DEPTH)]
    drafter = MedusaDrafter(heads, CHOICES_FILE, 1, torch.device("cpu"))
    draft_shape = drafter.draft_shapes(DEPTH)[-1]
    drafts = drafter.draft(MedusaRows(context.last_B1.float()), context, draft_shape, 0, {})
    assert draft_shape.parents is not None
    parents_BN = torch.tensor([draft_shape.parents]).expand_as(drafts.tokens_BN)
    return drafts._replace(parents_BN=parents_BN)


def two_chains(world: World, context: DraftContext) -> Drafts:
    """Merge a drawn chain with a looked-up chain of 0 to DEPTH tokens. In half of the rows the
    lookup continues a ring of tokens. In the others it repeats the drafter's most likely token."""
    made = chain(DEPTH)(world, context)
    token_BN = context.last_B1 + torch.arange(1, DEPTH + 1)
    looked_BN = token_BN % VOCAB
    is_even_B1 = context.num_known_B.unsqueeze(1) % 2 == 0
    likely_BN = world.drafter_VV.argmax(1)[context.last_B1].expand(-1, DEPTH)
    num_B = (context.last_B1.squeeze(1) + context.num_known_B) % (DEPTH + 1)
    return merge_chains(made, Drafts(torch.where(is_even_B1, likely_BN, looked_BN), num_B))


def looked_up_first(world: World, context: DraftContext) -> Drafts:
    """Put the looked-up chain before the drawn one."""
    drafts = two_chains(world, context)
    assert drafts.parents_BN is not None
    other_N = torch.arange(2 * DEPTH) ^ 1
    parents_BN = torch.where(drafts.parents_BN > 0, (drafts.parents_BN - 1 ^ 1) + 1, 0)
    q_BNV = None if drafts.q_BNV is None else drafts.q_BNV[:, other_N]
    return Drafts(drafts.tokens_BN[:, other_N], None, q_BNV, parents_BN[:, other_N])


WAYS: dict[str, Drafting] = {
    "beam of 4": beam(4),
    "beam of 9": beam(9),
    "static": static,
    "merged": two_chains,
    "merged, looked up first": looked_up_first,
}


def told(
    way: Drafting, s: SamplingParams = PLAIN, kind: str = REJECTION, num_rows: int = NUM_ROWS
) -> Tensor:
    return tell(
        WORLD,
        s,
        (kind,),
        limits(DEPTH, num_rows),
        num_drafts=DEPTH,
        num_tokens=3,
        drafting=way,
    )


def often(way: str, s: SamplingParams, kind: str) -> bool:
    """Whether the case is in every run, which has each way, setting and kind at least once."""
    number = SETTINGS.index(s)
    return (number + [*WAYS].index(way)) % 4 == (kind == REJECTION)


@pytest.mark.parametrize(
    ("way", "s", "kind"),
    [
        pytest.param(
            way,
            s,
            kind,
            marks=() if often(way, s, kind) else pytest.mark.slow,
            id=f"{way}-{kind}-{i}",
        )
        for way in WAYS
        for i, s in enumerate(SETTINGS)
        for kind in (REJECTION, REJECTION_GREEDY)
    ],
)
def test_three_tokens_follow_the_exact_joint_distribution(
    way: str, s: SamplingParams, kind: str
) -> None:
    num_rows = NUM_ROWS if often(way, s, kind) else MANY_ROWS
    check_tokens(told(WAYS[way], s, kind, num_rows), WORLD, s)


@pytest.mark.parametrize(
    "way", ["beam of 9", *(pytest.param(one, marks=pytest.mark.slow) for one in ("chain", *WAYS))]
)
def test_a_drafter_whose_logits_are_no_numbers_changes_no_distribution(way: str) -> None:
    """Some tokens are followed by NaN or -inf logits alone, others by a single NaN or inf."""
    drafter_VV = WORLD.drafter_VV.clone()
    drafter_VV[1] = drafter_VV[2, 3] = float("nan")
    drafter_VV[3], drafter_VV[4, 0] = float("-inf"), float("inf")
    world = World(WORLD.main_VV, drafter_VV)
    drafting = chain(DEPTH) if way == "chain" else WAYS[way]
    sizes = {"num_drafts": DEPTH, "num_tokens": 3}
    told = tell(world, PLAIN, (REJECTION,), limits(DEPTH, NUM_ROWS), drafting=drafting, **sizes)
    check_tokens(told, world, PLAIN)


def test_kinds_of_every_sort_share_a_batch() -> None:
    kinds = (REJECTION_GREEDY, STRICT, REJECTION)
    row_B = torch.arange(3 * NUM_ROWS)
    rule_B = torch.tensor([RULE_NUMBERS[kind] for kind in kinds])[row_B % 3]
    heat_B = torch.where(row_B % 30 < 3, 0.0, 1.0)
    many = tell(
        WORLD,
        PLAIN,
        kinds,
        limits(DEPTH, len(row_B)),
        num_drafts=DEPTH,
        num_tokens=2,
        rule_B=rule_B,
        temperature_B=heat_B,
        drafting=beam(6),
    )
    for kind in kinds:
        check_tokens(many[(rule_B == RULE_NUMBERS[kind]) & (heat_B > 0)], WORLD, PLAIN)
    first = WORLD.main_VV[0].argmax()
    greedy = torch.stack((first, WORLD.main_VV[first].argmax()))
    assert (many[heat_B == 0] == greedy).all()


def with_replacement(walk: recursive._Walk, **inputs: object) -> None:
    """Try siblings with q over all tokens, although they were drawn without replacement."""
    right_try(walk, **inputs)  # type: ignore[arg-type]
    walk.tried_BV = torch.zeros_like(walk.tried_BV)


def worth_of_tokens(*of: object) -> TopCandidates:
    """Score each place only by the log probability of its own token."""
    top = right_drawn(*of)  # type: ignore[arg-type]
    return top._replace(scores_BQK=top.log_probs_BQK)


def in_order_of_likelihood(*of: object) -> TopCandidates:
    """Order candidates by likelihood instead of the order in which they were drawn."""
    top = right_drawn(*of)  # type: ignore[arg-type]
    order = top.log_probs_BQK.argsort(2, descending=True)
    return top._replace(tokens_BQK=top.tokens_BQK.gather(2, order))


def of_first_tokens(*of: object) -> TopCandidates:
    """Return the most likely tokens, which are then judged as if they had been drawn."""
    top = right_drawn(*of)  # type: ignore[arg-type]
    tokens_BQK = ranking.top_by_logits(*of).tokens_BQK  # type: ignore[arg-type]
    return top._replace(tokens_BQK=tokens_BQK)


right_try, right_drawn = recursive._try_node, ranking.draw_without_replacement


@pytest.mark.parametrize("way", ["beam of 9", "static"])
@pytest.mark.parametrize("wrong", [worth_of_tokens, in_order_of_likelihood, of_first_tokens])
def test_trees_that_were_not_drawn_from_q_are_found_out(
    way: str, wrong: Callable[..., TopCandidates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A static tree does not use the scores, so that wrong scores have no effect there."""
    kind = ACCEPTANCE_RULES[REJECTION]
    monkeypatch.setitem(
        ACCEPTANCE_RULES, REJECTION, type(kind)(kind.sample_draft, wrong, kind.accept_drafts)
    )
    if way == "static" and wrong is worth_of_tokens:
        check_tokens(told(WAYS[way]), WORLD, PLAIN)
        return
    with pytest.raises(AssertionError):
        check_tokens(told(WAYS[way]), WORLD, PLAIN)


@pytest.mark.parametrize("way", ["beam of 9", "static", "merged, looked up first"])
def test_a_token_that_is_tried_twice_is_found_out(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings are drawn without replacement. A token that both chains contain counts once."""
    monkeypatch.setattr(recursive, "_try_node", with_replacement)
    with pytest.raises(AssertionError):
        check_tokens(told(WAYS[way]), WORLD, PLAIN)


def test_a_residual_of_p_and_all_drafts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong rule tries children against p, whatever was tried before."""

    def wrong(walk: recursive._Walk, verify_input: object, node: int, p_BV: Tensor) -> None:
        before_BV, end_B = walk.residual_BV, walk.end_B
        right_try(walk, verify_input, node, p_BV)  # type: ignore[arg-type]
        is_same_B1 = (walk.end_B == end_B).unsqueeze(1)
        walk.residual_BV = torch.where(is_same_B1, before_BV, walk.residual_BV)

    monkeypatch.setattr(recursive, "_try_node", wrong)
    with pytest.raises(AssertionError):
        check_tokens(told(WAYS["beam of 9"]), WORLD, PLAIN)


def test_more_children_are_accepted_than_of_a_chain() -> None:
    """Compares the tokens that each step emits; otherwise trees would have no advantage."""
    row_B = torch.arange(4000)
    counts = {}
    for name, way in (("chain", chain(DEPTH)), ("tree", beam(12))):
        steps: list[int] = []
        tell(
            WORLD,
            PLAIN,
            (REJECTION,),
            torch.full_like(row_B, DEPTH),
            num_drafts=DEPTH,
            num_tokens=12,
            drafting=lambda world, context, way=way, steps=steps: (  # type: ignore[misc]
                steps.append(1) or way(world, context)  # type: ignore[func-returns-value]
            ),
        )
        counts[name] = len(steps)
    assert counts["tree"] < counts["chain"], counts
