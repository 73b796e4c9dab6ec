"""State of a sequence on a prefill rank."""

from dataclasses import dataclass, field

from tandem.core.identity import Identity
from tandem.core.request import Request


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """A sequence whose prompt is computed on a prefill rank.

    Attributes:
        is_suspect: Whether the sequence must run alone in its steps.
        pages: Pages of all tokens, from their allocation until the lease ends.
        num_cached: Number of leading tokens that came from the prefix cache.
        token_ids: Prompt, and output tokens emitted earlier if the request resumes.
        num_computed: Number of leading tokens whose cache entries exist, cached ones included.
        started_at: Monotonic time in seconds at which the first chunk started.
    """

    identity: Identity
    request: Request
    is_suspect: bool = False
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    token_ids: tuple[int, ...] = field(init=False)
    num_computed: int = 0
    started_at: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = self.request.prompt_ids + self.request.output_ids

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed
