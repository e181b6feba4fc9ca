"""What every route that asks the model does: the request's id, and its answer as a whole or as a stream."""

from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Protocol

import pydantic
from fastapi import Header, Request
from starlette.responses import Response

from ...errors import IntarsiaError
from ..front_end.front_end import FrontEnd
from ..http.called import REQUEST_ID
from .answers import CLIENT_CLOSED, event_stream, json_response, while_connected
from .errors import event_for
from .protocol import ErrorResponse

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (
        (400, "The request cannot be served as asked; `param` names the field."),
        (401, "A key is wanted, and this is none."),
        (404, "No such model, or no such place."),
        (413, "The body is too large."),
        (429, "More is asked than can be served in time; `Retry-After` says when to try again."),
        (500, "An error of the server's own."),
        (503, "The engine is not there, or not now; `Retry-After` says when to try again."),
        (504, "The answer did not come in time."),
    )
}

SERVER_SENT_EVENTS: dict[str, Any] = {
    "description": "The answer, or with `stream` its pieces as server-sent events.",
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "properties": {
                    "event": {"type": "string"},
                    "data": {"type": "string", "description": "JSON, or [DONE] at the end."},
                },
                "required": ["data"],
            }
        }
    },
}
"""A streamed answer, as the OpenAPI document describes it."""

RequestId = Annotated[str | None, Header(alias="X-Request-Id", pattern=r"^[\x21-\x7e]{1,128}$")]


class Call(Protocol):
    """A request of any kind."""

    front_end: FrontEnd

    async def prepare(self) -> None: ...

    async def answer(self) -> pydantic.BaseModel: ...

    def events(self) -> AsyncGenerator[dict[str, Any] | str, None]: ...


class Identified(Protocol):
    """A body that may say what its request is called."""

    @property
    def request_id(self) -> str | None: ...


async def answered(
    call: Call, is_streaming: bool, request: Request, failed: Callable[[IntarsiaError], dict[str, Any]] | None = None
) -> Response:
    """failed: the last event of a stream that fails; None: the error as the client knows it"""
    await call.prepare()
    if is_streaming:
        return await event_stream(call.events(), failed or event_for(request.scope))
    answer = await while_connected(request, call.answer())
    return await json_response(call.front_end, answer) if answer is not None else Response(status_code=CLIENT_CLOSED)


def request_id_of(body: Identified, request: Request) -> str:
    """As the body says, the header, or as it was drawn."""
    called = request.scope[REQUEST_ID]
    called.id = body.request_id or called.id
    return called.id
