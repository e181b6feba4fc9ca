"""What gRPC's clients ask of leases beside requests: which are held, and that one ends."""

from typing import Any

from ...errors import UnknownLease
from ...proto import inference_pb2 as pb
from ..front_end.front_end import FrontEnd
from .convert import leases_to_proto


class LeaseMethods:
    """Methods of the service. Raise `IntarsiaError`, as the others do."""

    _front_end: FrontEnd

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Any) -> pb.Leases:
        return leases_to_proto(await self._front_end.leases.held())

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Any) -> pb.ReleaseLeaseResponse:
        if not await self._front_end.leases.release(request.lease):
            raise UnknownLease.of(request.lease)
        return pb.ReleaseLeaseResponse()
