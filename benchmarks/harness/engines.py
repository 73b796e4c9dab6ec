"""Both engines over one pool, driven by hand without hand-over or Ray."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tandem.core.config import TandemConfig
from tandem.core.config import load as load_config
from tandem.core.errors import TandemError
from tandem.core.identity import Identity
from tandem.core.info import COLOCATED, DECODE
from tandem.core.membership import RankSpec
from tandem.core.request import Request, SamplingParams, SequenceUpdate, Speculation, TokenFrame
from tandem.core.stopping import remaining_budget, stop_ids, truncate_at_stop
from tandem.decode_node.engine import DecodeEngine
from tandem.decode_node.planning.draft_length import (
    BatchSize,
    DraftLengthPolicy,
    StepCostModel,
    choose_largest,
)
from tandem.decode_node.planning.states import RequestSize, RunningSequence
from tandem.decode_node.planning.step_plan import StepPlan, StepProposal
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.kv_transfer.pages import PagePool
from tandem.model.loaded import LoadedModel, load_model
from tandem.prefill_node.engine import ChunkResult, PrefillEngine
from tandem.runtime.engine_loop import EngineLoop
from tandem.runtime.lockstep import LocalPlanner, Planner
from tandem.runtime.parts import RankParts

POISON = float("inf")
"""Value of cache entries that must never be read: 0 times infinity is NaN."""


class IdleFirst:
    """Drafts nothing in the first ``num_steps`` steps, then the number that rows want."""

    def __init__(self, num_steps: int) -> None:
        self._num_left = num_steps

    def __call__(self, costs: StepCostModel, batch: BatchSize, wanted: Items[int]) -> int:
        self._num_left -= 1
        return 0 if self._num_left >= 0 else choose_largest(costs, batch, wanted)


class Held:
    """Always chooses the draft shape ``level``."""

    def __init__(self, level: int) -> None:
        self._level = level

    def __call__(self, costs: StepCostModel, batch: BatchSize, wanted: Items[int]) -> int:
        return self._level


def planner_of(loaded: LoadedModel, max_depth: int, length: DraftLengthPolicy) -> StepPlanner:
    """Return a planner that pads no batches and measures nothing."""
    levels, catch_up = loaded.drafter.draft_shapes(max_depth), loaded.drafter.catch_up(max_depth)
    return StepPlanner(tuple(range(1, 65)), levels, length, catch_up)


@dataclass
class Bench:
    """A prefill and a decode engine over one pool.

    ``copy`` moves a prompt's pages to the decode sequence's, like a hand-over. ``firsts`` replaces
    the first tokens of prompts, by request. Create it right after ``loaded``: loading another model
    in between would change torch's number of threads.
    """

    loaded: LoadedModel
    num_drafts: int = 3
    max_rows: int = 4
    page_size: int = 8
    num_pages: int = 200
    max_batch_tokens: int = 2048
    handover_hidden: bool = True
    overlap: bool = False
    draft_length: str = "fixed"
    measures: bool = False
    buckets: tuple[int, ...] | None = None
    planner: Planner[StepProposal, StepPlan] | None = None
    length: DraftLengthPolicy | None = None
    firsts: dict[str, int] = field(default_factory=dict)
    frames: list[TokenFrame] = field(default_factory=list)
    progress: list[ChunkResult] = field(default_factory=list)
    failed: dict[Identity, TandemError] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_torch_threads = torch.get_num_threads()
        self.pool = PagePool(self.num_pages, self.page_size)
        self.caches = self.loaded.allocate_caches(self.num_pages, self.page_size)
        for cache in self.all_caches():
            cache[0] = POISON
        spec, config = RankSpec("both", COLOCATED, 1), self._config()
        parts = RankParts(
            spec, config, self.loaded, self.pool, self.caches, EngineLoop("never started")
        )
        planner = self.planner
        if self.length is not None:
            planner = LocalPlanner(planner_of(self.loaded, self.num_drafts, self.length))
        self.prefill = PrefillEngine(parts, self.progress.append, self.failed.__setitem__)
        self.decode = DecodeEngine(
            parts,
            on_updates=lambda updates: self.frames.append(TokenFrame(tuple(updates))),
            on_grant=lambda _: None,
            planner=planner,
        )

    def _config(self) -> TandemConfig:
        sections = {
            "prefill": {"max_num_batched_tokens": self.max_batch_tokens},
            "decode": {
                "max_num_seqs": self.max_rows,
                "overlap": self.overlap,
                "batch_sizes": self.buckets,
            },
            "speculation": {
                "max_depth": self.num_drafts,
                "draft_length": self.draft_length,
                "profile_at_startup": self.measures,
            },
        }
        return TandemConfig.model_validate(sections)

    def all_caches(self) -> list[torch.Tensor]:
        return [cache for group in self.caches.values() for cache in group]

    def start(self, request: Request) -> tuple[int, str | None]:
        """Prefill a request, hand over, and activate it unless the first token ends it."""
        return self.start_all(request)[request.request_id]

    def start_all(self, *requests: Request) -> dict[str, tuple[int, str | None]]:
        """Start several requests whose prompts share prefill steps; return results by request id.

        Requests that ``failed`` are left out and hold nothing.
        """
        torch.set_num_threads(self.num_torch_threads)
        pages: dict[Identity, tuple[int, ...]] = {}
        for request in requests:
            identity = self.identities[request.request_id] = Identity(request.request_id)
            num_output = len(request.output_ids)
            size = RequestSize(len(request.prompt_ids), num_output, request.sampling.max_tokens)
            self.decode.enqueue(identity, size)
            pages[identity] = self.decode.scheduler.get_grant(identity).pages
            self.prefill.scheduler.admit(identity, request)
        started: dict[str, tuple[int, str | None]] = {}
        num_seen = len(self.progress)
        while self.prefill.has_work():
            self.prefill.step()
            for identity in (
                pages.keys() & self.failed.keys() & self.prefill.scheduler.sequences.keys()
            ):
                self.prefill.scheduler.drop(identity)
                self.decode.drop(identity)
            for done in self.progress[num_seen:]:
                if done.first_token is not None:
                    identity = done.sequence.identity
                    first = self.firsts.get(identity.request_id, done.first_token)
                    self._copy(done.sequence.pages, pages[identity], done.sequence.num_computed)
                    self.prefill.scheduler.drop(identity)
                    reason = self._activate(replace(done, first_token=first))
                    started[identity.request_id] = first, reason
            num_seen = len(self.progress)
        assert len(started) + sum(one in self.failed for one in pages) == len(requests)
        return started

    def _activate(self, done: ChunkResult) -> str | None:
        """Activate a sequence; return the finish reason if it is over already, else None."""
        request, sampling = done.sequence.request, done.sequence.request.sampling
        assert done.first_token is not None
        budget = remaining_budget(
            len(request.prompt_ids),
            len(request.output_ids),
            sampling.max_tokens,
            self.loaded.max_model_len,
        )
        stops = stop_ids(sampling, self.loaded.config.eos_token_ids)
        _, reason = truncate_at_stop((done.first_token,), stops, budget)
        if reason is not None:
            self.decode.drop(done.sequence.identity)
        else:
            features_F = done.features_F if self.handover_hidden else None
            self.decode.activate(done.sequence.identity, request, done.first_token, features_F)
        return reason

    def _copy(self, source: Items[int], target: Items[int], num_tokens: int) -> None:
        num_pages = self.pool.num_pages_for(num_tokens)
        for cache in self.all_caches():
            cache[list(target[:num_pages])] = cache[list(source[:num_pages])]

    def generate(self, *requests: Request) -> list[tuple[list[int], str]]:
        """Return token ids and finish reasons of requests that run in one batch.

        The reason of a failed request is the name of its error.
        """
        started = self.start_all(*requests)
        answers: dict[str, tuple[list[int], str | None]] = {
            one.request_id: ([], type(error).__name__) for one, error in self.failed.items()
        }
        answers |= {name: ([first], reason) for name, (first, reason) in started.items()}
        self.frames.clear()
        while self.decode.has_work():
            self.decode.step()
        for update in self.updates():
            name = update.identity.request_id
            ids, _ = answers[name]
            reason = update.failure.kind if update.failure else update.finish_reason
            answers[name] = (ids + list(update.token_ids), reason)
        return [answers[r.request_id] for r in requests]  # type: ignore[misc]

    def sequence(self, request_id: str) -> RunningSequence:
        sequence = self.decode.scheduler.sequences[self.identities[request_id]]
        assert isinstance(sequence, RunningSequence)
        return sequence

    def drop(self, request_id: str) -> bool:
        return self.decode.drop(self.identities[request_id])

    def updates(self) -> list[SequenceUpdate]:
        return [update for frame in self.frames for update in frame.updates]

    def check_empty(self) -> None:
        self.prefill.scheduler.check_integrity()
        self.decode.scheduler.check_integrity()
        num_held = self.num_pages - 1 - self.pool.num_available
        assert num_held == 0, f"{num_held} pages leaked"


def load(path: Path, *sets: str) -> LoadedModel:
    """Load the checkpoint in fp32, or as the ``--set`` items say."""
    config = load_config(None, [f"model.path={path}", "model.dtype=float32", *sets])
    return load_model(config, DECODE)


def greedy(
    request_id: str, prompt: list[int] | tuple[int, ...], max_tokens: int, **more: object
) -> Request:
    max_drafts = more.pop("max_drafts", None)
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]
    return Request(
        request_id,
        tuple(prompt),
        sampling=sampling,
        speculation=Speculation(max_drafts),  # type: ignore[arg-type]
    )
