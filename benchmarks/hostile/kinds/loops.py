"""Clients that send one small request after the other."""

import asyncio

from benchmarks.hostile.kinds.base import Hostile, stub_of
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import STREAM_KEY


class FreshLoops(Hostile):
    """Sends fresh requests, as any client may: the control of resume loops.

    Attributes:
        num_clients: Requests at a time.
        num_tokens: Length of each answer.
        resume_ids: Tokens that each request claims to have.
        pause_s: Time from a refusal to the next request of that client.
    """

    num_clients = 3
    num_tokens = 16
    resume_ids: tuple[int, ...] = ()
    pause_s = 0.0

    async def run(self) -> None:
        async with stub_of(self.target.grpc) as stub:
            self.is_ready.set()
            await asyncio.gather(*(self._loop(stub, i) for i in range(self.num_clients)))

    async def _loop(self, stub: rpc.InferenceStub, number: int) -> None:
        message = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5 + number, 6, 7]),
            sampling=pb.Sampling(max_tokens=self.num_tokens, ignore_eos=True),
            resume_token_ids=self.resume_ids,
        )
        while True:
            if not await self.call(stub, message):
                await asyncio.sleep(self.pause_s)


class ResumeLoops(FreshLoops):
    """Claims without a proof that every request resumes an answer that has started."""

    resume_ids = (5,)


class ProvenLoops(FreshLoops):
    """Starts one answer per client and resumes that one, with its proof, again and again."""

    async def _loop(self, stub: rpc.InferenceStub, number: int) -> None:
        metadata = ((STREAM_KEY, f"loop-{number}"),)
        message = pb.GenerateRequest(
            request_id=f"loop-{number}",
            token_ids=pb.TokenIds(ids=[5 + number, 6, 7]),
            sampling=pb.Sampling(max_tokens=self.num_tokens, ignore_eos=True, seed=1),
        )
        async for response in stub.Generate(message, metadata=metadata):
            message.resume_proof = response.proof or message.resume_proof
            message.resume_token_ids.extend(response.delta.token_ids)
            if message.resume_token_ids:
                break
        self.counts["proofs"] += bool(message.resume_proof)
        while True:
            await self.call(stub, message)


class Crowd(FreshLoops):
    """Sends more requests at a time than a small gateway has rows and queue for."""

    num_clients = 40
    num_tokens = 60
    pause_s = 0.2
