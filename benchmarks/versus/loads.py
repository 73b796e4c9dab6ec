"""Which prompts each round sends, and how much is asked of an engine at once."""

from dataclasses import dataclass

from benchmarks.versus.checkpoints import Checkpoint
from benchmarks.versus.job import Trial

WARM_UP = -1


@dataclass(frozen=True, order=True)
class Load:
    prompt_tokens: int
    num_sequences: int
    temperature: float
    max_tokens: int

    @property
    def name(self) -> str:
        warm = f"-t{self.temperature:g}" if self.temperature else ""
        return f"p{self.prompt_tokens}-s{self.num_sequences}{warm}-o{self.max_tokens}"

    def trial(self, checkpoint: Checkpoint, batches: range) -> Trial:
        """The same prompts for every arm; those of each batch and the warm-up's are others."""
        warm_up, *rest = (self._prompts(checkpoint, batch) for batch in (WARM_UP, *batches))
        ignore_eos = not checkpoint.is_trained
        return Trial(self.name, warm_up, rest, self.max_tokens, ignore_eos, self.temperature)

    def _prompts(self, checkpoint: Checkpoint, batch: int) -> list[list[int]]:
        seed = 1000 * (batch + 1) + self.num_sequences
        return checkpoint.prompts(self.num_sequences, self.prompt_tokens, seed)


def loads_of(
    checkpoint: Checkpoint,
    prompts: list[int],
    sequences: list[int],
    temperatures: list[float],
    max_tokens: int,
    max_prompt_tokens: int,
) -> list[Load]:
    """Every prompt length by every number of sequences, up to ``max_prompt_tokens`` in all;
    sampled ones with the shortest prompts of a trained checkpoint only."""
    found = [
        Load(length, num, temperature, max_tokens)
        for temperature in temperatures
        for length in prompts
        for num in sequences
        if length * num <= max_prompt_tokens
        if not temperature or (checkpoint.is_trained and length == min(prompts))
    ]
    return sorted(found)
