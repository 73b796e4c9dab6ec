"""What one pull has received, checked against what prefill says."""

from dataclasses import dataclass

from core.errors import HandoverError, StalePages
from kv_transfer.layout import Layout
from kv_transfer.messages import Offer, Ready, Seal, Sent


@dataclass(frozen=True, slots=True)
class Chunk:
    """One transfer that arrived and was scattered; ``wire_s`` from receive to arrival."""

    sent: Sent
    wire_s: float


class Progress:
    """``num_pulled`` tokens per layout group, and the chunks that brought them."""

    def __init__(self, layout: Layout, offer: Offer) -> None:
        self.num_pulled = (0,) * len(layout.groups)
        self.chunks: list[Chunk] = []
        self._offer = offer

    def check(self, ready: Ready) -> None:
        """Raises HandoverError for counts that cannot be."""
        most = self._offer.num_tokens
        same_length = len(ready.num_tokens) == len(self.num_pulled)
        if not same_length or not all(
            got <= have <= most for got, have in zip(self.num_pulled, ready.num_tokens, strict=True)
        ):
            raise HandoverError(
                f"{self._offer.key}: {ready.num_tokens} tokens reported after "
                f"{self.num_pulled}, {most} were offered"
            )

    def check_seal(self, seal: Seal) -> None:
        """Raises HandoverError for other counts, StalePages for other pages."""
        key, offered = self._offer.key, self._offer.num_tokens
        if seal.num_tokens != self.num_pulled or seal.num_tokens[0] != offered:
            raise HandoverError(
                f"{key}: sealed at {seal.num_tokens} tokens, {self.num_pulled} were pulled "
                f"and {offered} offered"
            )
        for sent in (chunk.sent for chunk in self.chunks):
            sealed = seal.generations[sent.first_page : sent.first_page + len(sent.generations)]
            if sealed != sent.generations:
                raise StalePages(
                    f"{key}: pages from {sent.first_page} on were sent at generations "
                    f"{sent.generations} and sealed at {sealed}"
                )
