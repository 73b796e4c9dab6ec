"""The prompts of each round, and the number of requests that an engine gets at once."""

import random
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.versus.checkpoints import Checkpoint
from benchmarks.versus.job import Trial

WARM_UP = -1
NUM_WARMING = 4
"""Prompts of an engine's warm-up, before requests with arrival times."""


@dataclass(frozen=True, order=True)
class Load:
    prompt_tokens: int
    num_sequences: int
    temperature: float
    max_tokens: int
    rate_per_s: float = 0.0
    """Mean number of sequences sent per second, at random times (Poisson); 0 sends all at once."""
    num_busy: int = 0
    """Number of processes that compute on the engine's cores at the same time."""

    @property
    def name(self) -> str:
        warm = f"-t{self.temperature:g}" if self.temperature else ""
        rate = f"-r{self.rate_per_s:g}" if self.rate_per_s else ""
        busy = f"-b{self.num_busy}" if self.num_busy else ""
        return f"p{self.prompt_tokens}-s{self.num_sequences}{warm}-o{self.max_tokens}{rate}{busy}"

    def trial(self, checkpoint: Checkpoint, batches: range) -> Trial:
        """Return the trial. All arms get the same prompts; batches and warm-up have different
        ones."""
        warm_up, *rest = (self._prompts(checkpoint, batch) for batch in (WARM_UP, *batches))
        ignore_eos, arrivals_s = not checkpoint.is_trained, self.arrivals_s()
        if arrivals_s:
            warm_up = warm_up[:NUM_WARMING]
        how = self.max_tokens, ignore_eos, self.temperature, arrivals_s, self.num_busy
        return Trial(self.name, warm_up, rest, *how)

    def arrivals_s(self) -> list[float]:
        """Return arrival times, which are the same for every arm."""
        if not self.rate_per_s:
            return []
        rng = random.Random(f"arrivals {self.rate_per_s}")
        gaps = (rng.expovariate(self.rate_per_s) for _ in range(self.num_sequences - 1))
        return list(accumulate(gaps, initial=0.0))

    def _prompts(self, checkpoint: Checkpoint, batch: int) -> list[list[int]]:
        seed = 1000 * (batch + 1) + self.num_sequences + round(1e6 * self.rate_per_s)
        return checkpoint.prompts(self.num_sequences, self.prompt_tokens, seed)


def arriving(prompts: list[int], rates: list[float], num: int, max_tokens: int) -> list[Load]:
    """Return loads for every prompt length and rate, ``num`` requests each."""
    return [Load(length, num, 0.0, max_tokens, rate) for length in prompts for rate in rates]


def loads_of(
    checkpoint: Checkpoint,
    prompts: list[int],
    sequences: list[int],
    temperatures: list[float],
    max_tokens: int,
    max_prompt_tokens: int,
) -> list[Load]:
    """Return loads for every prompt length and number of sequences, up to ``max_prompt_tokens`` in
    all.

    Sampled loads use only the shortest prompts of a trained checkpoint.
    """
    found = [
        Load(length, num, temperature, max_tokens)
        for temperature in temperatures
        for length in prompts
        for num in sequences
        if length * num <= max_prompt_tokens
        if not temperature or (checkpoint.is_trained and length == min(prompts))
    ]
    return sorted(found)
