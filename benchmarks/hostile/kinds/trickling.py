"""Streams whose client reads a few bytes at a time."""

import asyncio

from benchmarks.harness.http2 import Connection, connection
from benchmarks.hostile.kinds.base import GENERATE, Hostile
from tandem.cluster.proto import tandem_pb2 as pb

NUM_STREAMS = 100
"""Open streams, more than the measured gateway has slots for."""
NUM_TOKENS = 150
WINDOW_BYTES = 1000
READ_BYTES = 700
READ_S = 0.25
OPEN_S = 0.25
"""Time between two new streams."""


class TricklingReaders(Hostile):
    """Opens streams and reads 2.8 kB a second of each. Answers have log probabilities and about 40
    kB."""

    async def run(self) -> None:
        async with connection(self.target.grpc, stream_window=WINDOW_BYTES) as own:
            streams: list[int] = []
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._open(own, streams))
                tasks.create_task(self._read(own, streams))

    async def _open(self, own: Connection, streams: list[int]) -> None:
        sampling = pb.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
        num_opened = 0
        while True:
            if len(streams) < NUM_STREAMS:
                ids = [5 + num_opened % 50, 6, 7]
                message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
                data = message.SerializeToString()
                streams.append(stream := own.open(GENERATE))
                num_opened += 1
                await own.upload(stream, b"\0" + len(data).to_bytes(4, "big") + data, is_end=True)
            if num_opened >= NUM_STREAMS:
                self.is_ready.set()
            await asyncio.sleep(OPEN_S)

    async def _read(self, own: Connection, streams: list[int]) -> None:
        while True:
            await asyncio.sleep(READ_S)
            for stream in [*streams]:
                if stream in own.ended:
                    streams.remove(stream)
                    status = own.ended[stream].get("grpc-status", "none")
                    self.counts[f"status {status}"] += 1
                else:
                    own.allow(stream, READ_BYTES)
