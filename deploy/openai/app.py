"""The routes, errors in OpenAI's shape, and what else there is to ask."""

import contextlib
import difflib
import json
import logging
import math
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Annotated, Any, Protocol

import pydantic
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import (
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    Overloaded,
    PoolExhausted,
    RequestAborted,
    Unauthenticated,
    UnknownModel,
)
from ...proto.tracing import INCOMING
from ..access import ROUTES, Access, Level
from ..console import ConsoleSettings, add_console
from ..front_end import FrontEnd
from ..limits import Limits
from ..metrics import METRICS_TYPE, render
from .answers import CLIENT_CLOSED, event_stream, json_response, now_s, while_connected
from .chat import ChatCall
from .completions import CompletionCall
from .protocol import (
    TOKEN_FORMAT,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    ModelCard,
    ModelList,
    PlainText,
    ResponseBody,
    ResponsesRequest,
    Sampling,
    TokenizeChat,
    TokenizeRequest,
    TokenizeText,
    Tokens,
)
from .requests import check_model, turns_aside
from .responses import ResponsesCall

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20

HALF_A_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
"""How JSON begins to name a surrogate, of which only pairs are characters."""

STATUSES: tuple[tuple[type[IntarsiaError], int, str, str | None], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (RequestAborted, CLIENT_CLOSED, "request_aborted", "request_aborted"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PoolExhausted, 429, "rate_limit_error", "overloaded"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (EngineUnavailable, 503, "service_unavailable_error", "engine_unavailable"),
)
"""(class, status, type, code), the first that fits; anything else is our own fault."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (
        (400, "The request can not be served as asked; `param` names the field."),
        (401, "A key is wanted, and this is none."),
        (404, "No such model, or no such place."),
        (413, "The body is too large."),
        (429, "More is asked than can be served in time; `Retry-After` says when to try again."),
        (500, "An error of the server's own."),
        (503, "The engine is not there, or not now; `Retry-After` says when to try again."),
        (504, "The answer did not come in time."),
    )
}

SERVER_SENT_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "description": "JSON, or [DONE] at the end."},
    },
    "required": ["data"],
}

STREAMED: dict[int | str, dict[str, Any]] = ERRORS | {
    200: {
        "description": "The answer, or with `stream` its pieces as server-sent events.",
        "content": {"text/event-stream": {"schema": SERVER_SENT_EVENT}},
    }
}

BODIES: dict[str, tuple[type[pydantic.BaseModel], ...]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (DetokenizeRequest,),
}
"""What is posted where."""

RequestId = Annotated[str | None, Header(alias="X-Request-Id", pattern=r"^[\x21-\x7e]{1,128}$")]


def make_app(
    front_end: Callable[[], FrontEnd],
    access: Access | None = None,
    console: ConsoleSettings | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """The application. front_end: called with each request, so that the engine may come later than the routes.
    limits: of what is read before that; what a request holds is judged by the front end's own."""
    app = FastAPI(title="Intarsia", version="1", docs_url=None, redoc_url=None)
    created = now_s()
    app.router.route_class = _TextRoute
    app.add_middleware(_BodyLimit)
    app.add_middleware(_Keys, access=access or Access())
    _answer_errors(app)
    _describe(app, front_end)

    @app.post("/v1/completions", response_model=Completion, responses=STREAMED, operation_id="complete")
    async def complete(body: CompletionRequest, request: Request, x_request_id: RequestId = None) -> Response:
        call = CompletionCall(front_end(), body, _request_id(body, x_request_id))
        return await _answered(call, bool(body.stream), request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED, operation_id="chat")
    async def chat(body: ChatRequest, request: Request, x_request_id: RequestId = None) -> Response:
        call = ChatCall(front_end(), body, _request_id(body, x_request_id))
        return await _answered(call, bool(body.stream), request)

    @app.post("/v1/responses", response_model=ResponseBody, responses=STREAMED, operation_id="respond")
    async def respond(body: ResponsesRequest, request: Request, x_request_id: RequestId = None) -> Response:
        call = ResponsesCall(front_end(), body, x_request_id or uuid.uuid4().hex)
        return await _answered(call, bool(body.stream), request)

    @app.get("/v1/models", response_model=ModelList, responses={503: ERRORS[503]}, operation_id="list_models")
    async def models() -> ModelList:
        return ModelList(data=[_card(front_end(), created)])

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=ERRORS, operation_id="get_model")
    async def model(model: str) -> ModelCard:
        check_model(model, front_end().info.model)
        return _card(front_end(), created)

    @app.post("/tokenize", response_model=Tokens, responses=ERRORS, operation_id="tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        return await _tokens(front_end(), body)

    @app.post("/detokenize", response_model=PlainText, responses=ERRORS, operation_id="detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        here = front_end()
        check_model(body.model, here.info.model)
        return await json_response(here, PlainText(prompt=await here.detokenize(body.tokens)))

    @app.get("/health", responses={503: ERRORS[503]}, operation_id="health")
    async def health() -> dict[str, str]:
        await front_end().check_ready()
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse, responses={503: ERRORS[503]}, operation_id="metrics")
    async def prometheus() -> Response:
        here = front_end()
        return Response(render(here.info, *await here.measured()), media_type=METRICS_TYPE)

    add_console(app, front_end, console or ConsoleSettings())
    return app


class Call(Protocol):
    """A request of any kind."""

    front_end: FrontEnd

    async def prepare(self) -> None: ...

    async def answer(self) -> pydantic.BaseModel: ...

    def events(self) -> AsyncGenerator[dict[str, Any] | str, None]: ...


async def _answered(call: Call, is_streaming: bool, request: Request) -> Response:
    await call.prepare()
    if is_streaming:
        return await event_stream(call.events(), lambda error: _shape(error)[1])
    answer = await while_connected(request, call.answer())
    return await json_response(call.front_end, answer) if answer is not None else Response(status_code=CLIENT_CLOSED)


def _request_id(body: Sampling, header: str | None) -> str:
    return body.request_id or header or uuid.uuid4().hex


def _card(front_end: FrontEnd, created: int) -> ModelCard:
    info = front_end.info
    return ModelCard(id=info.model, created=created, root=info.model, max_model_len=info.max_model_len)


async def _tokens(front_end: FrontEnd, body: TokenizeText | TokenizeChat) -> Response:
    check_model(body.model, front_end.info.model)
    if isinstance(body, TokenizeChat):
        turns, _ = await turns_aside(front_end, body.messages)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        begins = body.add_generation_prompt is not False
        tokens = await front_end.encode_chat(turns, tools, body.chat_template_kwargs, add_generation_prompt=begins)
    else:
        add = body.add_special_tokens is not False
        tokens = await front_end.encode(body.prompt, add_special_tokens=add, only_counted=True)
    texts = None
    if body.return_token_strs and (tokenizer := front_end.tokenizer) is not None:
        texts = await front_end.aside(len(tokens), lambda: [tokenizer.text_of(token) for token in tokens])
    found = Tokens.model_construct(
        count=len(tokens), max_model_len=front_end.info.max_model_len, tokens=tokens, token_strs=texts
    )
    return await json_response(front_end, found)


# -- errors ----------------------------------------------------------------------------------------------------------


def _shape(error: IntarsiaError) -> tuple[int, dict[str, Any]]:
    for kind, status, name, code in STATUSES:
        if isinstance(error, kind):
            return status, _error(error.message, name, error.field, code)
    return 500, _error(error.message, "server_error", error.field, None)


def _refusal(error: IntarsiaError) -> JSONResponse:
    status, body = _shape(error)
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status, headers=headers)


def _error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(IntarsiaError)
    async def ours(request: Request, error: IntarsiaError) -> Response:
        return _refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = _first_fault(error, request)
        return JSONResponse(_error(message, "invalid_request_error", param), 400)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(_error(message, "invalid_request_error"), error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED)  # for nobody: it went before its body was whole

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return JSONResponse(_error("internal error; the server's log has the details", "server_error"), 500)


def _first_fault(error: RequestValidationError, request: Request) -> tuple[str, str | None]:
    """What is wrong with a body, in words, and where. Of a value that fits none of several kinds, the nearest miss."""
    fault: Any = max(error.errors(), key=lambda each: len(each["loc"]))
    place = ".".join(_place(fault["loc"][1:], error.body))
    name = place.rpartition(".")[2]
    match fault["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(name, _known_fields(request), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            return f"{place} is no parameter of {request.url.path}.{hint}", place
        case "missing":
            return f"{place} is missing", place
        case "none_required":
            return f"{place} is not supported here; leave it out", place
        case "json_invalid":
            return f"the body is no JSON: {fault.get('ctx', {}).get('error', fault['msg'])}", None
    given = repr(fault.get("input"))
    shown = given if len(given) <= 80 else given[:76] + " ..."
    return f"{place or 'the body'}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {shown}", place or None


def _place(parts: Sequence[str | int], value: Any) -> Iterator[str]:
    """Of the parts, those that lead into `value`: others name one of several kinds that a value may have."""
    for n, part in enumerate(parts):
        is_inside = (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int))
        if is_inside:
            value = value[part]  # type: ignore[index]
            yield str(part)
        elif n == len(parts) - 1 and isinstance(value, dict):
            yield str(part)  # what is missing


def _known_fields(request: Request) -> list[str]:
    models = BODIES.get(request.url.path, ())
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


class _TextRoute(APIRoute):
    """Refuses bodies with texts that are none: JSON can name half a character, and nothing can be done with it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_text(request: Request) -> Response:
            if HALF_A_CHARACTER.search(body := await request.body()):
                with contextlib.suppress(ValueError, RecursionError):  # which the parser says better
                    _check_characters(json.loads(body))
            return await handle(request)

        return handle_text


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the body holds half of a surrogate pair ({error.object[error.start]!a}), which is no character"
        ) from None


class _Keys:
    """Lets requests pass that bring a key, where one is wanted; notes in which trace they come."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        INCOMING.set(headers.get(b"traceparent", b"").decode("latin-1"))
        if scope["type"] == "http":
            level = ROUTES.get(scope["path"], Level.KEY)  # a model's path has its name in it, and the same level
            try:
                self._access.check(level, headers.get(b"authorization", b"").decode("latin-1"))
            except Unauthenticated as error:
                await _refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BodyLimit:
    """Refuses bodies that are too large before they are read."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        length = dict(scope["headers"]).get(b"content-length", b"0")
        with contextlib.suppress(ValueError):
            if int(length) > MAX_BODY_BYTES:
                message = f"the body has {int(length)} bytes; the limit is {MAX_BODY_BYTES}"
                await JSONResponse(_error(message, "invalid_request_error"), 413)(scope, receive, send)
                return
        await self._app(scope, counted, send)


def _describe(app: FastAPI, front_end: Callable[[], FrontEnd]) -> None:
    """The OpenAPI document of the served model. Without the 422 that FastAPI adds: what is invalid is answered with
    400 here."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for operations in made["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                made.get("components", {}).get("schemas", {}).pop(name, None)
            _limit_tokens(made, front_end().info.vocab_size)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _limit_tokens(value: Any, vocab_size: int) -> None:
    """Wherever a schema speaks of token ids."""
    if isinstance(value, dict) and value.get("format") == TOKEN_FORMAT:
        value["maximum"] = vocab_size - 1
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _limit_tokens(inner, vocab_size)
