"""The routes, and what else there is to ask."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, Response

from ... import __version__
from ..console import ConsoleSettings, add_console
from ..front_end.access import Access
from ..front_end.front_end import FrontEnd
from ..front_end.request_log import RequestLog
from ..front_end.served_models import ServedModels, models_of
from ..http.prometheus import Measured, render
from ..settings.limits import Limits
from .answering import ERRORS, RequestId, answered, request_id_of
from .answers import json_response
from .chat import ChatCall
from .completions import CompletionCall
from .door import Bodies, Keys, Logged, Named, Place
from .errors import answer_errors
from .kept import KeptResponses
from .leases_app import add_leases
from .models import add_models
from .probe import add_probe
from .protocol import (
    TOKEN_FORMAT,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    PlainText,
    TokenizeChat,
    TokenizeRequest,
    TokenizeText,
    Tokens,
)
from .reading import reading_route
from .requests import as_template_has, check_begin, check_model, turns_aside
from .responses_app import STREAMED, add_responses

Interface = Callable[[FastAPI, Callable[[], FrontEnd]], None]

logger = logging.getLogger(__name__)


def make_app(
    front_end: Callable[[], FrontEnd],
    access: Access | None = None,
    console: ConsoleSettings | None = None,
    limits: Limits | None = None,
    root_path: str = "",
    allowed_origins: Sequence[str] = (),
    request_log: RequestLog | None = None,
    tells_ids: bool = True,
    kept: KeptResponses | None = None,
    interfaces: Sequence[Interface] = (),
) -> FastAPI:
    """The application. front_end: called with each request, so that the engine may come later than the routes; or the
    models that are served, of which each request names one.
    limits: of what is read before that; what a request holds is judged by the front end's own. root_path: where a proxy
    shows it; requests may come with this in front of their path, or without. allowed_origins: of pages in browsers
    whose scripts may ask. request_log: has a line of each request that asks for something. tells_ids: answers have the
    header `X-Request-Id`, which some proxies add themselves. kept: what is kept of responses; None: nothing.
    interfaces: add the routes of others than OpenAI's."""
    app = FastAPI(title="Intarsia", version="1", docs_url=None, redoc_url=None)
    limits, models = limits or Limits(), models_of(front_end)
    app.router.route_class = reading_route(models, limits)
    # What is added later sees a request earlier.
    app.add_middleware(Bodies, limits=limits)
    app.add_middleware(Keys, access=access or Access())
    if request_log is not None:
        app.add_middleware(Logged, log=request_log)
    if root_path:
        app.add_middleware(Place, root_path=root_path)
    app.add_middleware(Named, limits=limits, tells_ids=tells_ids)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
        )
    answer_errors(app)
    _describe(app, models)
    _add_generation(app, models)
    add_responses(app, models, kept)
    add_leases(app, models)
    for add in interfaces:
        add(app, models)
    add_models(app, models)
    _add_tokens(app, models)
    add_probe(app, models)
    _add_health(app, models, kept)
    add_console(app, models, console or ConsoleSettings())
    return app


def _add_generation(app: FastAPI, front_end: Callable[[], FrontEnd]) -> None:
    """Two ways to ask the model for an answer; the others are in files of their own."""

    @app.post("/v1/completions", response_model=Completion, responses=STREAMED, operation_id="complete")
    async def complete(body: CompletionRequest, request: Request, x_request_id: RequestId = None) -> Response:
        call = CompletionCall(front_end(), body, request_id_of(body, request))
        return await answered(call, bool(body.stream), request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED, operation_id="chat")
    async def chat(body: ChatRequest, request: Request, x_request_id: RequestId = None) -> Response:
        call = ChatCall(front_end(), body, request_id_of(body, request))
        return await answered(call, bool(body.stream), request)


def _add_tokens(app: FastAPI, front_end: Callable[[], FrontEnd]) -> None:
    """Text to tokens, and back."""

    @app.post("/tokenize", response_model=Tokens, responses=ERRORS, operation_id="tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        return await _tokens(front_end(), body)

    @app.post("/detokenize", response_model=PlainText, responses=ERRORS, operation_id="detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        here = front_end()
        check_model(body.model, here.info.model)
        return await json_response(here, PlainText(prompt=await here.detokenize(body.tokens)))


def _add_health(app: FastAPI, models: ServedModels, kept: KeptResponses | None) -> None:
    """What operators ask: the version, whether the engine is ready, and its figures."""

    @app.get("/version", operation_id="version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health", responses={503: ERRORS[503]}, operation_id="health")
    async def health() -> dict[str, str]:
        return {"status": "ok" if await models.check_ready() else "degraded"}

    @app.get("/metrics", response_class=PlainTextResponse, responses={503: ERRORS[503]}, operation_id="metrics")
    async def prometheus(request: Request) -> Response:
        figures = None if kept is None else await kept.figures()
        measured = [Measured(each.info, *await each.measured()) for each in models.each()]
        text, content_type = render(measured, request.headers.get("Accept", ""), figures)
        return Response(text, headers={"Content-Type": content_type})


async def _tokens(front_end: FrontEnd, body: TokenizeText | TokenizeChat) -> Response:
    check_model(body.model, front_end.info.model)
    if isinstance(body, TokenizeChat):
        turns, _ = await turns_aside(front_end, body.messages)
        tools = as_template_has(body.tools or ())
        begins, continues = body.add_generation_prompt, bool(body.continue_final_message)
        tokens = await front_end.encode_chat(
            turns,
            tools,
            body.chat_template_kwargs,
            add_generation_prompt=check_begin(begins, continues),
            continue_final_message=continues,
            add_special_tokens=bool(body.add_special_tokens),
        )
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


def _describe(app: FastAPI, models: ServedModels) -> None:
    """The OpenAPI document of the served models. Without the 422 that FastAPI adds: what is invalid is answered with
    400 here."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for operations in made["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                made.get("components", {}).get("schemas", {}).pop(name, None)
            _limit_tokens(made, max(each.info.vocab_size for each in models.each()))
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _limit_tokens(value: Any, vocab_size: int) -> None:
    """Wherever a schema speaks of token ids."""
    if isinstance(value, dict) and value.get("format") == TOKEN_FORMAT:
        value["maximum"] = vocab_size - 1
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _limit_tokens(inner, vocab_size)
