"""The served models, in a list and by name: what each can do, how its answers are read, how long its requests may be.

A client that sends `anthropic-version` gets Anthropic's list.
"""

from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from ...errors import InvalidRequest
from ..front_end.front_end import FrontEnd
from ..front_end.served_models import ServedModels
from ..http.anthropic_errors import speaks_anthropic
from ..http.anthropic_models import card_of, list_of
from .answering import ERRORS
from .answers import now_s
from .protocol import Capabilities, ModelCard, ModelList, Parsers
from .requests import check_model

MOST_LISTED = 1000
"""Of a list of Anthropic's."""


def add_models(app: FastAPI, models: ServedModels) -> None:
    created = now_s()

    @app.get("/v1/models", response_model=ModelList, responses=ERRORS, operation_id="list_models")
    async def list_models(
        request: Request,
        limit: int = Query(20, ge=1, le=MOST_LISTED, description="Of Anthropic's list."),
        after_id: str | None = Query(None, max_length=256),
        before_id: str | None = Query(None, max_length=256),
    ) -> Response:
        cards = [_card(each, created) for each in models.each()]
        if not speaks_anthropic(request.scope):
            return JSONResponse(ModelList(data=cards).model_dump())
        shown = [card_of(card.id, created, card.max_model_len) for card in cards]
        for field, name in (("after_id", after_id), ("before_id", before_id)):
            if name is not None and all(card["id"] != name for card in shown):
                raise InvalidRequest(f"no model has the id '{name[:100]}'", field=field)
        return JSONResponse(list_of(shown, limit, after_id, before_id))

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=ERRORS, operation_id="get_model")
    async def get_model(model: str, request: Request) -> Response:
        models.choose(model)
        here = models()
        check_model(model, here.info.model)
        card = _card(here, created)
        if speaks_anthropic(request.scope):
            return JSONResponse(card_of(card.id, created, card.max_model_len))
        return JSONResponse(card.model_dump())


def _card(front_end: FrontEnd, created: int) -> ModelCard:
    info, form = front_end.info, front_end.answer_format.form
    has_text = front_end.tokenizer is not None
    has_chat = front_end.tokenizer is not None and front_end.tokenizer.has_chat
    thinks = form is not None and (bool(form.thoughts) or form.kind == "channels")
    calls = form is not None and (bool(form.calls) or form.kind == "channels")
    told: dict[str, Any] = {
        "completions": True,
        "chat_completions": has_chat,
        "responses": has_chat,
        "messages": has_chat,
        "tools": has_chat,
        "thinking": has_chat and thinks,
        "vision": info.image_token_id is not None,
        "structured_outputs": has_text and bool(info.eos_token_ids),
        "logprobs": True,
        "prefix_caching": info.enable_prefix_caching,
    }
    name = form.name if form is not None else None
    return ModelCard(
        id=info.model,
        created=created,
        root=info.model,
        parent=None,
        max_model_len=info.max_model_len,
        capabilities=Capabilities(**told),
        parsers=Parsers(tool_call=name if calls else None, reasoning=name if thinks else None),
    )
