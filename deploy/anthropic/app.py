"""The routes of Anthropic's interface."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Request
from fastapi.responses import Response

from ..front_end.front_end import FrontEnd
from ..http.anthropic_errors import OVERLOADED
from ..http.called import REQUEST_ID
from ..openai.answering import SERVER_SENT_EVENTS, RequestId, answered, request_id_of
from ..openai.answers import json_response
from .messages import MessagesCall, count_tokens
from .protocol import CountRequest, FaultBody, InputTokens, MessageBody, MessagesRequest

FAULTS: dict[int | str, dict[str, Any]] = {
    status: {"model": FaultBody, "description": description}
    for status, description in (
        (400, "The request cannot be served as asked."),
        (401, "A key is wanted, and this is none."),
        (404, "No such model, or no such place."),
        (413, "The body is too large."),
        (429, "The client itself has as much here as it may; `Retry-After` says when to try again."),
        (500, "An error of the server's own."),
        (503, "The engine is not there, or not now; `Retry-After` says when to try again."),
        (504, "The answer did not come in time."),
        (OVERLOADED, "More is asked than can be served in time; `Retry-After` says when to try again."),
    )
}

Version = Annotated[Literal["2023-06-01", "2026-10-21"], Header(alias="anthropic-version")]
"""The later one differs in what it refuses: it has no `temperature`, `top_p` and `top_k`, which are taken here."""


def add_messages(app: FastAPI, front_end: Callable[[], FrontEnd]) -> None:
    """An answer, and how many tokens a request would have."""

    @app.post(
        "/v1/messages",
        response_model=MessageBody,
        responses=FAULTS | {200: SERVER_SENT_EVENTS},
        operation_id="create_message",
    )
    async def create_message(
        body: MessagesRequest,
        request: Request,
        x_request_id: RequestId = None,
        anthropic_version: Version = "2023-06-01",
    ) -> Response:
        call = MessagesCall(front_end(), body, request_id_of(body, request))
        return _named(await answered(call, bool(body.stream), request), request)

    @app.post(
        "/v1/messages/count_tokens", response_model=InputTokens, responses=FAULTS, operation_id="count_message_tokens"
    )
    async def count(
        body: CountRequest, request: Request, x_request_id: RequestId = None, anthropic_version: Version = "2023-06-01"
    ) -> Response:
        here = front_end()
        return _named(await json_response(here, await count_tokens(here, body)), request)


def _named(answer: Response, request: Request) -> Response:
    """Under the header in which Anthropic's clients look for the request's id."""
    answer.headers["request-id"] = request.scope[REQUEST_ID].id
    return answer
