"""The four calls of ``tandem.v1.Inference``, mapped to those of ``Admission``."""

from typing import TypeAlias

import grpc

from tandem.cluster.entrypoints.request_mapping import to_raw_request
from tandem.cluster.gateway.admission import Admission
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import STREAM_KEY
from tandem.cluster.proto.mapping import piece_to_proto, to_proto
from tandem.core.answer import Piece

_Context: TypeAlias = grpc.aio.ServicerContext


class InferenceServicer(rpc.InferenceServicer):
    """gRPC service of ``admission``. cluster/entrypoints/calls.py turns errors into statuses."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def Generate(self, message: pb.GenerateRequest, context: _Context) -> None:
        first = {"digest": self._admission.get_gateway().model.digest}

        async def write(piece: Piece) -> None:
            await context.write(piece_to_proto(piece, **first))
            first.clear()

        def add_proof(proof: str) -> None:
            first["proof"] = proof

        nonce = str(dict(context.invocation_metadata() or ()).get(STREAM_KEY, ""))
        await self._admission.answer(
            raw_request=to_raw_request(message), write=write, nonce=nonce, on_proof=add_proof
        )

    async def Abort(self, message: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        return pb.AbortResponse(found=await self._admission.abort(message.request_id))

    async def GetModelInfo(self, _: pb.GetModelInfoRequest, context: _Context) -> pb.ModelInfo:
        return to_proto(pb.ModelInfo, self._admission.get_gateway().model)

    async def GetStatus(self, _: pb.GetStatusRequest, context: _Context) -> pb.Status:
        return to_proto(pb.Status, await self._admission.status())
