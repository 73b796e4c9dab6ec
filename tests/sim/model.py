"""A simulated checkpoint whose next token is a hash of all cache entries that it reads.

So any wrong, stale or foreign entry changes the tokens. Steps take virtual time. ``expected``
computes the same answers without a cache.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.core.config import TandemConfig
from tandem.core.placement import Placement
from tandem.core.progress import LOADING, on_startup_progress
from tandem.core.request import Request
from tandem.core.stopping import remaining_budget, stop_ids, truncate_at_stop
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.drafters.base import Drafter
from tandem.model.drafters.ngram import NgramDrafter
from tandem.model.drafters.none import NoDrafter
from tandem.model.kernels.base import Kernels
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch, gather_pages
from tandem.model.network.cache import MAIN, Caches
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.sampling.sampler import SamplingRows, draw
from tests.sim.loop import here

MODULUS = 4093
NUM_TOKENS = 96
EOS = 1
MOST_SLOTS = 1024
SHARPNESS = 3.0
WEIGHTS, OTHER_WEIGHTS = "5", "6"
"""Digests of the checkpoint that the expected answers come from, and of another one."""
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes"
"""Torch's message for a failed allocation."""
SLOW_S = 0.3, 2.0
"""Range of a slow step's duration in seconds, below every stall timeout."""


@cache
def _table(weights: str) -> Tensor:
    """Return the logits of each hash, for a checkpoint of these weights."""
    generator = torch.Generator().manual_seed(int(weights))
    return torch.randn(MODULUS, NUM_TOKENS, generator=generator) * SHARPNESS


@cache
def _factors() -> Tensor:
    """Return a factor for each position of a text, so that the hash depends on the order."""
    draw_ = random.Random(9)
    return torch.tensor([draw_.randrange(1, MODULUS) for _ in range(MOST_SLOTS)])


class HashNetwork:
    """Has the interface of DeepseekV3.

    A step takes ``step_s`` plus a time for each token. The next step of a process in ``failing``
    raises. Steps of a process in ``slow`` take SLOW_S until the given time.
    """

    def __init__(
        self,
        draw_: random.Random,
        failing: set[str],
        slow: dict[str, float],
        step_s: float,
        weights: str,
    ) -> None:
        self._draw, self._failing, self._slow, self._step_s = draw_, failing, slow, step_s
        self._table = _table(weights)

    def forward_with_taps(
        self, batch: Batch, caches: Caches, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(batch, caches)
        return hidden, hidden

    def _hidden(self, batch: Batch, caches: Caches) -> Tensor:
        num_tokens, me = batch.token_ids_BQ.numel(), here().name
        if me in self._failing:
            self._failing.remove(me)
            raise RuntimeError("a step that fails")
        time.sleep(self._step_s * self._draw.uniform(0.5, 1.5) + 1e-4 * num_tokens)  # time: virtual
        if self._slow and time.monotonic() < self._slow.get(me, 0.0):
            time.sleep(self._draw.uniform(*SLOW_S))  # time: virtual
        cache = caches[MAIN][0]
        flat = cache.view(-1, cache.shape[-1])
        flat[batch.write_slots_BQ.flatten(), 0] = batch.token_ids_BQ.flatten().float() + 1
        if batch.segments is None:
            hash_BQ = _hashes(gather_pages(cache, batch.page_table_BP), batch.context_lens_BQ)
        else:
            hash_BQ = self._of_segments(batch, cache)
        hidden = torch.zeros(*hash_BQ.shape, 2)
        hidden[..., 0] = hash_BQ.float()
        return hidden

    def _of_segments(self, batch: Batch, cache: Tensor) -> Tensor:
        segments, size = batch.segments, cache.shape[1]
        assert segments is not None
        found, first, page = [], 0, 0
        for length, context in zip(segments.lengths, segments.contexts, strict=True):
            num_pages = -(-context // size)
            pages_1P = batch.page_table_BP[:, page : page + num_pages]
            lens_1Q = batch.context_lens_BQ[:, first : first + length]
            found.append(_hashes(gather_pages(cache, pages_1P), lens_1Q))
            first, page = first + length, page + num_pages
        num_padding = batch.token_ids_BQ.shape[1] - first
        return torch.cat([*found, torch.zeros(1, num_padding, dtype=torch.int64)], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table[hidden[..., 0].long()]


def _hashes(context_BSL: Tensor, context_lens_BQ: Tensor) -> Tensor:
    """Hash the first ``context_lens_BQ`` entries of each row. Returns [B, Q]."""
    entries_BS = context_BSL[..., 0].long()
    terms_BS = entries_BS * entries_BS * _factors()[: entries_BS.shape[1]] % MODULUS
    sums_BS = torch.nn.functional.pad(terms_BS.cumsum(1), (1, 0)) % MODULUS
    return sums_BS.gather(1, context_lens_BQ.clamp(max=entries_BS.shape[1]))


class Logits:
    """Logits of the token that follows a text, for a checkpoint of these weights."""

    def __init__(self, token_ids: Sequence[int], weights: str) -> None:
        self._table, self._factors = _table(weights), _factors()
        entries = torch.tensor(token_ids) + 1
        terms = entries * entries * self._factors[: len(token_ids)] % MODULUS
        self._total, self._num_tokens = int(terms.sum()), len(token_ids)

    def next_1V(self) -> Tensor:
        return self._table[self._total % MODULUS].unsqueeze(0)

    def push(self, token: int) -> None:
        """Append ``token`` to the text."""
        self._total += (token + 1) * (token + 1) * int(self._factors[self._num_tokens])
        self._num_tokens += 1


def expected(request: Request, max_model_len: int, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of the answer."""
    sampling = request.sampling
    num_most = remaining_budget(len(request.prompt_ids), 0, sampling.max_tokens, max_model_len)
    stops = stop_ids(sampling, eos_ids)
    rows = SamplingRows.of([sampling], torch.device("cpu"))
    logits, output = Logits(request.prompt_ids, WEIGHTS), list[int]()
    while True:
        token = int(draw(logits.next_1V(), rows, torch.tensor([len(output)])))
        output.append(token)
        kept, reason = truncate_at_stop((*output,), stops, num_most)
        if reason is not None:
            return kept
        logits.push(token)


class _Dispatch(Dispatch):
    """Dispatches no tokens; the ranks of a gang still run in lockstep."""

    def __init__(self, placement: Placement | None) -> None:
        super().__init__(1)
        self.placement = placement

    def set_group(self, group: Any) -> None:
        pass


def raise_once(errors: dict[str, Exception]) -> None:
    """Raise the error set for this process, and remove it."""
    if (error := errors.pop(here().name, None)) is not None:
        raise error


class Loads:
    """Replaces ``load_model`` of runtime/parts.py."""

    def __init__(self, folder: Path, draw_: random.Random) -> None:
        self._config, self._draw, self._folder = ModelConfig.from_dir(folder), draw_, folder
        self.step_s = 0.01
        self.failing: set[str] = set()
        self.arrivals: dict[str, Exception] = {}
        """Error of the next arrival of a sequence, by process."""
        self.slow: dict[str, float] = {}
        self.weights = WEIGHTS
        """Digest of the weights at the checkpoint's path. All other paths have OTHER_WEIGHTS."""

    def __call__(
        self,
        config: TandemConfig,
        kind: str,
        rank: int = 0,
        placement: Placement | None = None,
        check_digest: Callable[[str], None] = lambda digest: None,
    ) -> LoadedModel:
        weights = self.weights if config.model.path == self._folder else OTHER_WEIGHTS
        check_digest(weights)
        for share in (0.25, 0.5, 0.75, 1.0):
            time.sleep(self._draw.uniform(0.1, 0.6))  # time: virtual
            on_startup_progress.get()(LOADING, share)
        network: Any = HashNetwork(self._draw, self.failing, self.slow, self.step_s, weights)
        most = config.model.max_model_len or self._config.max_position_embeddings
        drafter: Drafter = NoDrafter()
        if config.speculation.drafter == NgramDrafter.name:
            drafter = NgramDrafter(config.speculation.max_matching_ngram_size, oldest=False)
        parts = self._config, network, drafter, _Dispatch(placement), Kernels()
        return LoadedModel(*parts, torch.float32, torch.device("cpu"), most, False, None, weights)
