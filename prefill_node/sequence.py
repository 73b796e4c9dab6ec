"""A request's state on a prefill rank."""

from dataclasses import dataclass, field

from tandem.core.identity import Identity
from tandem.core.request import Request


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """``token_ids`` are prompt and resumed output; slots [0, num_computed) are computed, the first
    ``num_cached`` of them by an earlier prompt. ``pages`` hold all of it, from when it was
    placed until its lease ends. ``started_at`` is the monotonic time its first chunk began at.
    One that ``is_suspect`` shares no step.
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
