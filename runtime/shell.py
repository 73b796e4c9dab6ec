"""What every node's actor is: a shell around a rank, bytes in and bytes out, no Ray in it."""

from collections.abc import Callable
from typing import Protocol

from core.config import TandemConfig
from core.info import NodeInfo
from core.membership import RankSpec
from core.schema import encode_failure, pack, unpack
from runtime.frames import Frame, FrameServer


class Rank(Protocol):
    """A running rank as its shell sees it."""

    @property
    def info(self) -> NodeInfo: ...

    async def handle(self, method: str, payload: bytes) -> bytes: ...

    async def stop(self) -> None: ...


class StreamingRank(Rank, Protocol):
    """A rank that emits frames."""

    def subscribe(self, reader: Callable[[Frame], None]) -> Callable[[], None]: ...


class RankShell:
    """``start`` builds the rank; until then nothing else may be called.

    A subclass imports its rank only in ``build``: whoever creates the actor needs no torch.
    """

    rank: Rank | None = None

    def __init__(self, spec: bytes, config_json: str) -> None:
        self._spec = unpack(RankSpec, spec)
        self._config = TandemConfig.model_validate_json(config_json)

    async def build(self, spec: RankSpec, config: TandemConfig) -> Rank:
        raise AssertionError(f"{type(self).__name__} builds no rank")

    async def start(self) -> bytes:
        """Packed NodeInfo, or the packed Failure that kept the node from starting."""
        try:
            self.rank = await self.build(self._spec, self._config)
            return pack(self.rank.info)
        except Exception as error:
            return encode_failure(error)

    async def call(self, method: str, payload: bytes) -> bytes:
        assert self.rank is not None, "start comes first"
        return await self.rank.handle(method, payload)

    async def stop(self) -> None:
        if self.rank is not None:
            await self.rank.stop()


class StreamingShell(RankShell):
    """The shell of a rank whose frames are read over a socket."""

    rank: StreamingRank | None = None
    _frames: FrameServer | None = None

    async def frame_address(self) -> bytes:
        """Listen for readers from now on: the packed FrameAddress, or a packed Failure."""
        assert self.rank is not None, "start comes first"
        if self._frames is None:
            self._frames = FrameServer(self._spec.host, self.rank.subscribe)
        try:
            return pack(await self._frames.listen())
        except ValueError as error:
            return encode_failure(error)

    async def stop(self) -> None:
        if self._frames is not None:
            await self._frames.stop()
        await super().stop()
