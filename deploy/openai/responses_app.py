"""The routes of `/v1/responses`. Those about kept responses are there where responses are kept."""

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from ...errors import InvalidRequest
from ..front_end.front_end import FrontEnd
from .answering import ERRORS, SERVER_SENT_EVENTS, RequestId, answered, request_id_of
from .answers import event_stream, json_response
from .conversations_app import add_conversations
from .errors import event_for
from .kept import KeptResponses
from .pages import MOST_ITEMS, page_of
from .protocol import ResponseBody, ResponseDeleted, ResponseItems, ResponsesRequest
from .responses import ResponsesCall, references_of

STREAMED = ERRORS | {200: SERVER_SENT_EVENTS}


def add_responses(app: FastAPI, front_end: Callable[[], FrontEnd], kept: KeptResponses | None) -> None:
    """kept: None: no response is kept."""

    @app.post("/v1/responses", response_model=ResponseBody, responses=STREAMED, operation_id="respond")
    async def respond(body: ResponsesRequest, request: Request, x_request_id: RequestId = None) -> Response:
        here, request_id = front_end(), request_id_of(body, request)
        if kept is None:
            _check_not_kept(body)
            call = ResponsesCall(here, body, request_id)
            return await answered(call, bool(body.stream), request, call.failed)
        call = await kept.call(here, body, request_id)
        if not body.background:
            return await answered(call, bool(body.stream), request, call.failed)
        await call.prepare()
        running = kept.begin(call)
        if body.stream:
            return await event_stream(running.follow(-1), event_for(request.scope))
        return await json_response(here, call.so_far())

    if kept is not None:
        _add_kept(app, front_end, kept)
        add_conversations(app, front_end, kept.conversations)


def _add_kept(app: FastAPI, front_end: Callable[[], FrontEnd], kept: KeptResponses) -> None:
    path = "/v1/responses/{response_id}"

    @app.get(path, response_model=ResponseBody, responses=STREAMED, operation_id="get_response")
    async def get_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, description="The sequence number of an event.")] = None,
    ) -> Response:
        if not stream:
            if starting_after is not None:
                raise InvalidRequest("starting_after is of a stream: give stream=true", field="starting_after")
            return await json_response(front_end(), await kept.find(response_id))
        events = await kept.follow(response_id, -1 if starting_after is None else starting_after)
        return await event_stream(events, event_for(request.scope))

    @app.get(f"{path}/input_items", response_model=ResponseItems, responses=ERRORS, operation_id="list_input_items")
    async def list_input_items(
        response_id: str,
        after: Annotated[str | None, Query(description="The id of the item before.")] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        items = await kept.items(response_id)
        return await json_response(front_end(), page_of(items if order == "asc" else items[::-1], after, limit))

    @app.delete(path, response_model=ResponseDeleted, responses=ERRORS, operation_id="delete_response")
    async def delete_response(response_id: str) -> ResponseDeleted:
        await kept.delete(response_id)
        return ResponseDeleted(id=response_id)

    @app.post(f"{path}/cancel", response_model=ResponseBody, responses=ERRORS, operation_id="cancel_response")
    async def cancel_response(response_id: str) -> Response:
        return await json_response(front_end(), await kept.cancel(response_id))


def _check_not_kept(body: ResponsesRequest) -> None:
    """Raises `InvalidRequest` for what needs responses to be kept. That they are not is told by `store: false`."""
    if body.previous_response_id is not None:
        raise InvalidRequest(
            "this server keeps no responses: leave it out, and send the whole conversation",
            field="previous_response_id",
        )
    if body.conversation is not None:
        raise InvalidRequest(
            "this server keeps no conversations: leave it out, and send the whole conversation", field="conversation"
        )
    if references_of(body):
        raise InvalidRequest(
            "this server keeps no responses, so no item can be named by item_reference; send the item itself",
            field="input",
        )
    if body.background:
        raise InvalidRequest(
            "this server keeps no responses, so none are made in the background here; leave background out",
            field="background",
        )
