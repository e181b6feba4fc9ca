"""Several models behind one address: each call goes to the servicer of the model that it has named."""

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UnknownLease
from ...proto import inference_pb2 as pb
from ..front_end.front_end import FrontEnd
from ..front_end.served_models import OneModel, ServedModels
from .convert import leases_to_proto


def servicer_of(
    models: ServedModels, make: Callable[[FrontEnd], Any]
) -> tuple[Any, Callable[[str | None], None] | None]:
    """What answers the calls, and what hears before each of them which model it names; None where there is one model.
    make: the servicer of one front end."""
    if isinstance(models, OneModel):
        return make(models()), None
    return ServicerOfModels(models, {each: make(each) for each in models.each()}), models.choose


class ServicerOfModels:
    """`intarsia.v1.Inference` out of several engines. What names a request or a lease is looked for in all of them."""

    def __init__(self, models: ServedModels, servicers: Mapping[FrontEnd, Any]):
        self._models, self._servicers = models, servicers

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        return lambda request, context: getattr(self._servicers[self._models()], method)(request, context)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        found = [(await each.Abort(request, context)).found for each in self._servicers.values()]
        return pb.AbortResponse(found=any(found))

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Any) -> pb.Leases:
        return leases_to_proto([lease for each in self._models.each() for lease in await each.leases.held()])

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Any) -> pb.ReleaseLeaseResponse:
        for each in self._models.each():
            if await each.leases.release(request.lease):
                return pb.ReleaseLeaseResponse()
        raise UnknownLease.of(request.lease)
