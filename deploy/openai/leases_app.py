"""The routes of leases: which are held, and how one ends by hand."""

from fastapi import FastAPI
from starlette.responses import Response

from ...errors import UnknownLease
from ..front_end.leases import told
from ..front_end.served_models import ServedModels
from .answering import ERRORS
from .answers import json_response
from .lease_bodies import HeldLease, LeaseList, LeaseReleased


def add_leases(app: FastAPI, models: ServedModels) -> None:
    """Of all models that are served. Callers with a tenant's key see that tenant's leases, and no other."""

    @app.get("/v1/leases", response_model=LeaseList, responses={503: ERRORS[503]}, operation_id="list_leases")
    async def list_leases() -> Response:
        held = [
            HeldLease(**told(lease.receipt), tenant=lease.tenant, is_awaited=lease.is_awaited)
            for each in models.each()
            for lease in await each.leases.held()
        ]
        return await json_response(models(), LeaseList(data=held))

    @app.delete("/v1/leases/{lease_id}", response_model=LeaseReleased, responses=ERRORS, operation_id="release_lease")
    async def release_lease(lease_id: str) -> LeaseReleased:
        for each in models.each():
            if await each.leases.release(lease_id):
                return LeaseReleased(id=lease_id)
        raise UnknownLease.of(lease_id)
