"""Texts of megabytes, one after the other."""

import asyncio

from benchmarks.hostile.kinds.base import Hostile, stub_of
from tandem.cluster.entrypoints.uploads import BASE_MESSAGE_BYTES, BYTES_PER_TOKEN
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import MAX_MESSAGE_BYTES

NUM_BYTES = 6_000_000
NUM_CALLS = 2
"""Calls of each length at a time."""
WORDS = "def f(x):\n    return x + 1\n"
OTHER_FIELDS_BYTES = 1000


class LongTexts(Hostile):
    """Sends texts of 6 MB, and texts as long as the gateway receives: those are tokenised."""

    async def run(self) -> None:
        async with stub_of(self.target.grpc) as stub:
            model = await stub.GetModelInfo(pb.GetModelInfoRequest())
            bound = min(BASE_MESSAGE_BYTES + BYTES_PER_TOKEN * model.max_model_len, NUM_BYTES)
            assert bound < MAX_MESSAGE_BYTES
            lengths = (NUM_BYTES, bound - OTHER_FIELDS_BYTES)
            self.is_ready.set()
            calls = [self._send(stub, length) for length in lengths for _ in range(NUM_CALLS)]
            await asyncio.gather(*calls)

    async def _send(self, stub: rpc.InferenceStub, length: int) -> None:
        text = (WORDS * (length // len(WORDS) + 1))[:length]
        message = pb.GenerateRequest(text=text, sampling=pb.Sampling(max_tokens=1))
        while True:
            await self.call(stub, message)
