"""Quality of drafts: tokens per step, overlap of distributions, and the effect of lossy
acceptance."""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.accepted_length import measure, requests
from benchmarks.drafters.arms import Arm
from benchmarks.harness.engines import Bench
from tandem.core.config import TINY_MODEL
from tandem.core.request import REJECTION, RELAXED, STRICT, TYPICAL, Request, Speculation
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Segment, pack_segments
from training.corpus import BOS_ID, EOS_ID

HOT = 0.8
GRAM = 8
BATCH, PAGE_SIZE = 16, 64
RELAXED_TOP, RELAXED_DELTA = 4, 0.3


def lengths(arm: Arm, num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """Return the tokens per step of chains of 3 and of the maximum shape, greedy and at HOT.

    Also returns alpha, the share of first drafts that rejection sampling accepts. It measures the
    overlap of both distributions.
    """
    asked = {t: requests(TINY_MODEL, num_prompts, num_tokens, t) for t in (0.0, HOT)}
    three, most = arm.loaded(3), arm.loaded()
    rejection = [replace(one, speculation=Speculation(acceptance=REJECTION)) for one in asked[HOT]]
    told: dict[str, Any] = {}
    for t, name in ((0.0, "greedy"), (HOT, "hot")):
        told[f"{name}_3"] = measure(three, asked[t], 3)["accepted_length"]
        told[f"{name}_most"] = measure(most, asked[t], arm.depth)["accepted_length"]
    alpha = measure(three, rejection, 3)["accepted_per_position"]
    assert isinstance(alpha, list)
    return told | {"alpha": alpha[0]}


def repeated(num_prompts: int, num_tokens: int) -> dict[str, float]:
    """Return the share of GRAM-token n-grams of greedy answers that occurred earlier in their
    text."""
    found = {}
    for t, name in ((0.0, "greedy"), (HOT, "hot")):
        asked = requests(TINY_MODEL, num_prompts, num_tokens, t)
        texts = answers(Arm("none", ("speculation.drafter=none",), 1).loaded(), asked)
        shares = [
            _repeated(one.prompt_ids, tokens) for one, tokens in zip(asked, texts, strict=True)
        ]
        found[name] = sum(shares) / len(shares)
    return found


def _repeated(prompt: tuple[int, ...], tokens: list[int]) -> float:
    text, seen, num = [*prompt, *tokens], set(), 0
    for end in range(GRAM, len(text) + 1):
        gram = tuple(text[end - GRAM : end])
        num += end > len(prompt) and gram in seen
        seen.add(gram)
    return num / len(tokens)


def answers(loaded: LoadedModel, asked: list[Request], depth: int = 1) -> list[list[int]]:
    bench = Bench(loaded, num_drafts=depth, max_rows=BATCH, num_pages=600, page_size=PAGE_SIZE)
    found: list[list[int]] = []
    for at in range(0, len(asked), BATCH):
        found += [tokens for tokens, _ in bench.generate(*asked[at : at + BATCH])]
        bench.frames.clear()
    return found


@torch.inference_mode()
def nats(loaded: LoadedModel, asked: list[Request], texts: list[list[int]]) -> float:
    """Return the loss of these answers under the model itself, in nats per token."""
    total, num = 0.0, 0
    for request, tokens in zip(asked, texts, strict=True):
        ids = [*request.prompt_ids, *tokens]
        pages = list(range(1, 2 - -len(ids) // PAGE_SIZE))
        caches = loaded.allocate_caches(len(pages) + 1, PAGE_SIZE)
        batch = pack_segments([Segment(ids[:-1], 0, pages)], PAGE_SIZE, loaded.device)
        hidden = loaded.network(batch, caches)[0, len(request.prompt_ids) - 1 :]
        log_p = loaded.network.logits(hidden).log_softmax(-1)
        total -= float(log_p.gather(1, torch.tensor(tokens)[:, None]).sum())
        num += len(tokens)
    return total / num


def lossy(arm: Arm, num_prompts: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Compare lossy kinds of acceptance with strict acceptance.

    Returns tokens per step, the share of answers that differ, and the loss of their text.
    """
    # Make all of an answer thinking: BOS, which starts a prompt, opens it, and EOS never occurs.
    loaded, told = replace(arm.loaded(), think_ids=(BOS_ID, EOS_ID)), {}
    relaxed = Speculation(
        acceptance=RELAXED, relaxed_top_n=RELAXED_TOP, relaxed_delta=RELAXED_DELTA
    )
    for t, kind in ((0.0, relaxed), (HOT, Speculation(acceptance=TYPICAL))):
        asked = requests(TINY_MODEL, num_prompts, num_tokens, t)
        texts = {}
        for one in (Speculation(acceptance=STRICT), kind):
            mine = [replace(request, speculation=one) for request in asked]
            texts[one.acceptance] = answers(loaded, mine, arm.depth)
            told[f"{one.acceptance} at {t}"] = {
                "length": float(str(measure(loaded, mine, arm.depth)["accepted_length"])),
                "nats": nats(loaded, mine, texts[one.acceptance]),
                "differ": sum(
                    a != b for a, b in zip(texts[STRICT], texts[one.acceptance], strict=True)
                )
                / len(asked),
            }
    return told
