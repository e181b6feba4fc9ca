"""Errors in OpenAI's shape; in Anthropic's, where its interface is asked."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from ...errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    Overloaded,
    PoolExhausted,
    RequestAborted,
    Unauthenticated,
    UnknownLease,
    UnknownModel,
    UnknownPrevious,
    UnknownResponse,
)
from ..front_end.request_log import CLIENT_CLOSED, note_error
from ..http.anthropic_errors import fault_of, speaks_anthropic, status_of
from ..http.called import REQUEST_ID
from .reading import shown

STATUSES: tuple[tuple[type[IntarsiaError], int, str, str | None], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (UnknownPrevious, 400, "invalid_request_error", "previous_response_not_found"),
    (UnknownResponse, 404, "invalid_request_error", None),
    (UnknownLease, 404, "invalid_request_error", None),
    (ContextTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (RequestAborted, CLIENT_CLOSED, "request_aborted", "request_aborted"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PoolExhausted, 429, "rate_limit_error", "overloaded"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (EngineUnavailable, 503, "service_unavailable_error", "engine_unavailable"),
)
"""(class, status, type, code), the first that fits; anything else is our own fault."""

LONGEST_MISSPELT_CHARS = 64
"""The longest name for which a similar one is looked for: the search takes long for a long one, and no name of ours is
longer."""

LONGEST_PLACE_CHARS = 120

BOUNDS = {
    "greater_than": ("below_min_value", "below minimum value. Expected a value > {gt}, but got {input} instead"),
    "greater_than_equal": ("below_min_value", "below minimum value. Expected a value >= {ge}, but got {input} instead"),
    "less_than": ("above_max_value", "above maximum value. Expected a value < {lt}, but got {input} instead"),
    "less_than_equal": ("above_max_value", "above maximum value. Expected a value <= {le}, but got {input} instead"),
}
"""For each fault of a number, the end of OpenAI's code and its sentence."""


def shape(error: IntarsiaError) -> tuple[int, dict[str, Any]]:
    """(status, body) of an error of ours."""
    for kind, status, name, code in STATUSES:
        if isinstance(error, kind):
            return status, body_of(error.message, name, error.field, code)
    return 500, body_of(error.message, "server_error", error.field, None)


def shape_for(scope: Scope, error: IntarsiaError) -> tuple[int, dict[str, Any]]:
    """The same as the client of a request knows it."""
    status, body = shape(error)
    if not speaks_anthropic(scope):
        return status, body
    status = status_of(error, status)
    return status, fault_of(scope, status, error.message, error.details.get("error_code"))


def event_for(scope: Scope) -> Callable[[IntarsiaError], dict[str, Any]]:
    """Makes the last event of a stream that fails."""
    return lambda error: shape_for(scope, error)[1]


def refusal(error: IntarsiaError, scope: Scope) -> JSONResponse:
    note_error(error)
    status, body = shape_for(scope, error)
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(scope, status, body, headers)


def refused(
    scope: Scope,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """What the door or the application refuses by itself: the request's fault below 500, our own above."""
    if speaks_anthropic(scope):
        body = fault_of(scope, status, message)
    else:
        body = body_of(message, "invalid_request_error" if status < 500 else "server_error", param, code)
    return _answer(scope, status, body, headers or {})


def _answer(scope: Scope, status: int, body: dict[str, Any], headers: Mapping[str, str]) -> JSONResponse:
    own = {"request-id": scope[REQUEST_ID].id} if speaks_anthropic(scope) else {}
    return JSONResponse(body, status, headers={**headers, **own})


def body_of(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer_errors(app: FastAPI) -> None:
    """Whatever goes wrong in the application is answered so."""

    @app.exception_handler(IntarsiaError)
    async def ours(request: Request, error: IntarsiaError) -> Response:
        return refusal(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param, code = _first_fault(error, request.scope)
        return refused(request.scope, 400, message, param, code)

    @app.exception_handler(HTTPException)
    async def turned_away(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {_cut(get_route_path(request.scope))}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = _methods(request)
            message += f"; it takes {headers['Allow']}"
        return refused(request.scope, error.status_code, message, headers=headers)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED)  # which no one hears: the client went before its body was whole

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refused(request.scope, 500, "internal error; the server's log has the details")


def _methods(request: Request) -> str:
    """Those of all routes of a path: several may have it, each with a method of its own."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    found = [each.methods or () for each in routes if each.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for methods in found for method in methods}))


def _first_fault(error: RequestValidationError, scope: Scope) -> tuple[str, str | None, str | None]:
    """What is wrong with a body, in words, where, and in OpenAI's one word. Of a value that fits none of several kinds,
    the nearest miss: one of the right type before others."""
    fault: Any = max(error.errors(), key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    parts = [*_place(fault["loc"][1:], error.body)]
    name, place = parts[-1] if parts else "", _cut(".".join(map(_cut, parts)))
    match fault["type"]:
        case "extra_forbidden":
            told = f"Unknown parameter: '{place}' of {get_route_path(scope)}.{_meant(name, scope)}"
            return told, place, "unknown_parameter"
        case "missing" if not place:
            return "the request has no body; send a JSON object", None, None
        case "missing":
            return f"Missing required parameter: '{place}'.", place, "missing_required_parameter"
        case "none_required":
            return f"{place} is not supported here; leave it out", place, "unsupported_parameter"
        case "too_short" if fault["input"] == []:
            expected = "Expected an array with minimum length 1, but got an empty array instead."
            return f"Invalid '{place}': empty array. {expected}", place, "empty_array"
        case "literal_error":
            expected = fault["ctx"]["expected"]
            return f"Invalid value: {shown(fault['input'])}. Supported values are: {expected}.", place, "invalid_value"
        case "union_tag_invalid":
            tag, expected = fault["ctx"]["tag"], fault["ctx"]["expected_tags"]
            return f"Invalid value: {shown(tag)}. Supported values are: {expected}.", place, "invalid_value"
        case "json_invalid":
            return f"the body is no JSON: {fault.get('ctx', {}).get('error', fault['msg'])}", None, None
    if fault["type"] in BOUNDS:
        return _beyond(fault, place)
    said = fault["msg"].removeprefix("Value error, ")
    message = f"{said[0].lower()}{_cut(said[1:], 300)}"
    code = "invalid_type" if fault["type"].endswith("_type") else "invalid_value"
    return f"{place or 'the body'}: {message}, got {shown(fault.get('input'))}", place or None, code


def _beyond(fault: Any, place: str) -> tuple[str, str | None, str]:
    """The sentence about a number that is too small or too large."""
    word, sentence = BOUNDS[fault["type"]]
    kind = "integer" if all(isinstance(each, int) for each in fault["ctx"].values()) else "decimal"
    bounds = {name: int(bound) if bound == int(bound) else bound for name, bound in fault["ctx"].items()}
    told = sentence.format(**bounds, input=shown(fault["input"]))
    return f"Invalid '{place}': {kind} {told}.", place or None, f"{kind}_{word}"


def _place(parts: Sequence[str | int], value: Any) -> Iterator[str]:
    """The parts of a place that lead into `value`: others name one of several kinds that a value may have."""
    for n, part in enumerate(parts):
        if isinstance(value, dict) and value.get("type") == part and n + 1 < len(parts) and parts[n + 1] in value:
            continue  # the kind, although there is a member of that name, too
        is_inside = (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int))
        if is_inside:
            value = value[part]  # type: ignore[index]
            yield str(part)
        elif n == len(parts) - 1 and isinstance(value, dict):
            yield str(part)  # what is missing


def _meant(name: str, scope: Scope) -> str:
    if len(name) > LONGEST_MISSPELT_CHARS:
        return ""
    body = getattr(scope.get("route"), "body_field", None)
    models = _models(body.field_info.annotation) if body is not None else ()
    known = [field.alias or each for model in models for each, field in model.model_fields.items()]
    near = difflib.get_close_matches(name, set(known) - {name}, n=1)  # one place may know it, and another not
    return f" Did you mean {near[0]}?" if near else ""


def _models(kind: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Those that an annotation names, a union's too."""
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _models(part)


def _cut(text: str, most_chars: int = LONGEST_PLACE_CHARS) -> str:
    return text if len(text) <= most_chars else f"{text[: most_chars - 4]} ..."
