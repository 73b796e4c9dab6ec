"""Rules that every drafter has to meet. To test a new drafter, add an entry to DRAFTERS."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.engines import Bench, Held, load
from benchmarks.harness.held_out import held_out
from benchmarks.harness.procs import ROOT
from tandem.core.answer import TokenLogprobs
from tandem.core.config import TINY_MODEL
from tandem.core.request import PREEMPTED, Request, SamplingParams, Speculation, TokenBias
from tandem.model.loaded import LoadedModel

HEADS, EAGLE, EAGLE3, MODULES, SMALL = (
    ROOT / "training" / f"tiny-v3-{name}"
    for name in ("medusa", "eagle", "eagle3", "vanilla", "draft")
)
DEEP = "speculation.max_depth=4"
DRAFTERS: dict[str, tuple[str, ...]] = {
    "mtp": ("speculation.max_depth=3",),
    "mtp tree": (DEEP, "speculation.max_tree_nodes=16"),
    "vanilla": (DEEP, f"model.path={MODULES}"),
    "eagle": (DEEP, "speculation.drafter=eagle", f"speculation.draft_model_path={EAGLE}"),
    "eagle tree": (
        *(DEEP, "speculation.drafter=eagle", f"speculation.draft_model_path={EAGLE}"),
        *("speculation.max_tree_nodes=16", "speculation.top_k=6"),
    ),
    "eagle3": (DEEP, "speculation.drafter=eagle3", f"speculation.draft_model_path={EAGLE3}"),
    "eagle3 tree": (
        *(DEEP, "speculation.drafter=eagle3", f"speculation.draft_model_path={EAGLE3}"),
        "speculation.max_tree_nodes=16",
    ),
    "medusa": (DEEP, "speculation.drafter=medusa", f"speculation.draft_model_path={HEADS}"),
    "medusa tree": (
        *(DEEP, "speculation.drafter=medusa", f"speculation.draft_model_path={HEADS}"),
        "speculation.max_tree_nodes=24",
    ),
    "draft_model": (
        DEEP,
        "speculation.drafter=draft_model",
        f"speculation.draft_model_path={SMALL}",
    ),
    "draft_model tree": (
        *(DEEP, "speculation.drafter=draft_model", f"speculation.draft_model_path={SMALL}"),
        "speculation.max_tree_nodes=16",
    ),
    "ngram+mtp": ("speculation.max_depth=3", "speculation.drafter=ngram+mtp"),
    "self": (DEEP, "speculation.drafter=self", "speculation.draft_budget_pages=3"),
    "ngram": (DEEP, "speculation.drafter=ngram"),
    "pool": (DEEP, "speculation.drafter=ngram", "speculation.is_public_pool=true"),
    "class": (
        DEEP,
        "speculation.drafter=tests.user_drafters:Repeats",
        "speculation.drafter_timeout_s=5",
    ),
    "class tree": (
        *("speculation.max_depth=4", "speculation.drafter=tests.user_drafters:Branches"),
        *("speculation.max_tree_nodes=8", "speculation.drafter_timeout_s=5"),
    ),
}
"""Config options that select each drafter on the shipped checkpoint. User-defined classes get a
long timeout, so that a busy machine does not make them fail."""
_BLIND = "ngram", "pool", "class", "draft_model", "self"
HIDDEN = tuple(name for name in DRAFTERS if name.split()[0] not in _BLIND)
"""Drafters that read hidden states, which may not have been shipped."""


WITHOUT_TREES = "eagle", "eagle3", "medusa", "draft_model", "class", "pool"
"""Drafters that need no test of their own. Each "tree" variant runs the same code and more. "pool"
is "ngram" plus the n-grams of other requests."""


def depth_of(name: str) -> int:
    return int(DRAFTERS[name][0].rpartition("=")[2])


def loaded_with(name: str, dtype: str, path: Path = TINY_MODEL) -> LoadedModel:
    """Load with the native kernels: other kernels may choose differently between near-ties."""
    return load(path, "model.kernels=native", f"model.dtype={dtype}", *DRAFTERS[name])


def loaded_head(kind: str, folder: Path) -> LoadedModel:
    """Load the shipped checkpoint in fp32 with an EAGLE head from ``folder``."""
    name = "eagle3" if kind == "eagle3" else "eagle"
    asked = f"speculation.drafter={name}", f"speculation.draft_model_path={folder}"
    return load(TINY_MODEL, "model.kernels=native", *asked)


def texts(num: int, *, least: int = 16, most: int = 64, seed: int = 3) -> list[list[int]]:
    return held_out(num, least, most, seed)


def mixed(prompts: Sequence[list[int]], num_tokens: int) -> list[Request]:
    """Return requests that take turns over every option that keeps an answer a function of the
    request: greedy, sampled, filtered, penalties, biases, log probabilities, bounds on drafts."""
    plain = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    hot = replace(plain, temperature=0.8)
    kinds = [
        plain,
        hot,
        replace(hot, top_p=0.9, top_k=50, min_p=0.01),
        replace(plain, repetition_penalty=1.2, presence_penalty=0.4, logprobs=2),
        replace(hot, frequency_penalty=0.5, logit_bias=(TokenBias(9, 3.0),), logprobs=0),
        replace(plain, ignore_eos=False, min_tokens=num_tokens // 2, stop_token_ids=(10, 13)),
    ]
    return [
        Request(
            f"r{i}",
            (*ids,),
            sampling=replace(kinds[i % len(kinds)], seed=1000 + i),
            speculation=Speculation((None, None, 2, None, 1, 0)[i // len(kinds) % 6]),
        )
        for i, ids in enumerate(prompts)
    ]


Answer = list[tuple[int, TokenLogprobs | None]]


def told(bench: Bench, asked: list[Request], spare: int | None = None) -> list[Answer]:
    """Return the tokens of each answer with the requested log probabilities, except for the first
    token.

    If only ``spare`` pages are left once all requests have started, some are preempted. Those are
    resumed one by one from where they stopped.
    """
    answers: dict[str, Answer] = {request.request_id: [] for request in asked}
    left = [asked]
    while left:
        for name, (first, _) in bench.start_all(*left.pop()).items():
            answers[name].append((first, None))
        bench.frames.clear()
        num_taken = 0 if spare is None else max(0, bench.pool.num_available - spare)
        taken = bench.pool.allocate(num_taken)
        while bench.decode.has_work():
            bench.decode.step()
        bench.pool.release(taken)
        bench.check_empty()
        for update in bench.updates():
            more = update.logprobs or [None] * len(update.token_ids)
            answers[update.identity.request_id] += zip(update.token_ids, more, strict=True)
        ends = {one.identity.request_id: one.finish_reason for one in bench.updates()}
        left += [
            [replace(one, output_ids=tuple(token for token, _ in answers[one.request_id]))]
            for one in asked
            if ends.get(one.request_id) == PREEMPTED
        ]
    return [answers[request.request_id] for request in asked]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in answers]


def bench_of(loaded: LoadedModel, name: str, level: int | None = None, **more: object) -> Bench:
    """Return a bench whose steps all draft at ``level`` (None: the highest level that rows
    allow)."""
    held = None if level is None else Held(level)
    depth = depth_of(name)
    return Bench(loaded, num_drafts=depth, length=held, max_rows=8, **more)  # type: ignore[arg-type]
