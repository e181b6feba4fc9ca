"""What gRPC tells of an engine beside answers: its facts, how busy it is, what its cache knows, and who leases it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ...errors import UnknownLease
from ...proto import inference_pb2 as pb
from ...proto import inference_pb2_grpc as pb_grpc
from ..front_end.front_end import FrontEnd
from .convert import cache_state_to_proto, events_to_proto, info_to_proto, leases_to_proto, load_to_proto


class FiguresServicer(pb_grpc.InferenceServicer):
    """Those methods of `intarsia.v1.Inference` that ask nothing of the model."""

    def __init__(self, front_end: FrontEnd):
        self._front_end = front_end

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.Load:
        return load_to_proto(await self._front_end.load())

    async def GetCacheState(self, request: pb.GetCacheStateRequest, context: Any) -> pb.CacheState:
        return cache_state_to_proto(await self._front_end.cache_state())

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Any) -> pb.Leases:
        return leases_to_proto(await self._front_end.leases.held())

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Any) -> pb.ReleaseLeaseResponse:
        if not await self._front_end.leases.release(request.lease):
            raise UnknownLease.of(request.lease)
        return pb.ReleaseLeaseResponse()

    async def WatchCacheEvents(
        self, request: pb.WatchCacheEventsRequest, context: Any
    ) -> AsyncIterator[pb.CacheEvents]:
        async with contextlib.aclosing(self._front_end.watch_cache()) as watch:
            async for events in watch:
                if events.message is None:  # else another watcher was told the same
                    events.message = events_to_proto(events)
                yield events.message

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.ModelInfo:
        return info_to_proto(self._front_end.info)
