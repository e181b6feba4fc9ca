"""From the bytes of a body to the model of a request, within the limits of the door, and beside the event loop where it
is long.

    bytes -> how long and deep is it? -> JSON -> how long are its lists? -> model

Each stage bounds what the next one makes of it, so that a body of 32 MiB costs no more than what it may hold.
"""

import json
import reprlib
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from ...errors import ContextTooLong, InvalidRequest
from ...proto.request import MAX_BIASES
from ..front_end.access import TENANT
from ..front_end.served_models import ServedModels
from ..http.json_scan import Extent, extent
from ..settings.limits import Limits, check_id
from .protocol import MEMBERS

LONG_BODY_BYTES = 16 * 1024
"""A longer one is read beside the event loop."""

HALF_A_CHARACTER = (rb"\ud8", rb"\ud9", rb"\uda", rb"\udb", rb"\udc", rb"\udd", rb"\ude", rb"\udf")
"""How JSON begins to name a surrogate, of which only pairs are characters."""


def reading_route(models: ServedModels, limits: Limits) -> type[APIRoute]:
    """Routes whose bodies are read so. A body names the model that answers it."""

    class ReadingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            field = self.body_field
            if field is None:
                return handle
            validate = field.validate

            async def read_and_handle(request: Request) -> Response:
                body = await request.body()
                if body and not _is_json(request):
                    kind = request.headers.get("content-type", "")
                    raise InvalidRequest(
                        f"the body is said to be {shown(kind) if kind else 'of no kind'}; send the header "
                        "Content-Type: application/json"
                    )
                if body:
                    reader = BodyReader(limits, models.roomiest.info.max_model_len)
                    if len(body) <= LONG_BODY_BYTES:
                        request._json = made = reader.parse(body)
                        models.choose(made.get("model") if isinstance(made, dict) else None)
                    else:
                        work = partial(reader.model, body, validate)
                        request._json = made = await models().beside.run(TENANT.get(), work, len(body))
                        models.choose(getattr(made, "model", None))
                    request._body = b"read"  # and what it was is not needed any more
                    request.scope.get(RELEASE, lambda: None)()
                return await handle(request)

            return read_and_handle

    return ReadingRoute


RELEASE = "intarsia.release_body"
"""The entry of a scope with the function to call once a body has become a request."""


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


class BodyReader:
    """Reads one body."""

    def __init__(self, limits: Limits, max_model_len: int):
        self._limits = limits
        self._max_model_len = max_model_len

    def parse(self, body: bytes) -> Any:
        """JSON as Python has it. Raises `RequestValidationError` for what is none, `InvalidRequest` for what is too
        long or too deep, or names half a character."""
        limits = self._limits
        if len(body) > LONG_BODY_BYTES or body.count(b"[") + body.count(b"{") > limits.max_nesting:
            self._check_extent(body)
        try:
            value = json.loads(body.decode("utf-8-sig"))  # strictly: Python's own reader takes half characters
        except json.JSONDecodeError as error:
            raise _no_json(error.msg, error.pos) from None
        except RecursionError:
            raise _no_json("it is nested too deeply", 0) from None
        except UnicodeDecodeError as error:
            raise _no_json(f"it is no UTF-8 from byte {error.start} on", error.start) from None
        except ValueError as error:  # a number of more digits than Python reads
            raise _no_json(str(error)[:200], 0) from None
        lowered = body.lower() if b"\\u" in body else b""
        if any(half in lowered for half in HALF_A_CHARACTER):
            check_characters(value)
        if isinstance(value, dict):
            self._check_lists(value)
        return value

    def model(self, body: bytes, validate: Callable[..., tuple[Any, Any]]) -> Any:
        """The model of a request. Raises as `parse`, and `RequestValidationError` for what is no such model."""
        value = self.parse(body)
        made, errors = validate(value, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=value)
        return made

    def _check_extent(self, body: bytes) -> None:
        most = Extent(max(self._limits.max_json_items, 2 * self._max_model_len), self._limits.max_nesting)
        found = extent(body, most)
        if found.levels > most.levels:
            raise InvalidRequest(
                f"the body has lists and objects within each other over more than {most.levels} levels (max_nesting)",
                limit=most.levels,
            )
        if found.items > most.items:
            raise InvalidRequest(
                f"the body has more than {most.items} values (max_json_items); send fewer, in several requests",
                limit=most.items,
            )

    def _check_lists(self, body: dict[str, Any]) -> None:
        """Check the lists at the top of a body, and those in its messages."""
        limits = self._limits
        _check_members(body, "the body", None, MEMBERS)
        for name, limit in (("logit_bias", MAX_BIASES), ("metadata", MEMBERS)):
            if isinstance(inner := body.get(name), dict):
                _check_members(inner, name, name, limit)
        for name, limit, what in (
            ("stop_token_ids", limits.max_stop_token_ids, "tokens"),
            ("messages", limits.max_messages, "messages"),
            ("input", limits.max_messages, "items"),
            ("system", limits.max_messages, "parts"),
            ("tools", limits.max_tools, "tools"),
            ("tokens", max(limits.max_counted_tokens, self._max_model_len), "tokens"),
        ):
            _check_length(body.get(name), name, limit, what)
        messages = body.get("messages")
        for number, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, dict):
                place = f"messages.{number}"
                _check_members(message, place, place, MEMBERS)
                _check_parts(message.get("content"), f"{place}.content", limits.max_messages)
                _check_length(message.get("tool_calls"), f"{place}.tool_calls", limits.max_messages, "calls")
        is_cut = body.get("truncate_prompt_tokens") is not None
        self._check_prompt(body.get("prompt"), self._limits.max_json_items if is_cut else self._max_model_len)
        request_id = body.get("request_id")
        if isinstance(request_id, str):
            check_id(request_id, limits)

    def _check_prompt(self, prompt: Any, most_tokens: int) -> None:
        if not isinstance(prompt, list) or not prompt:
            return
        if isinstance(prompt[0], int):
            self._check_tokens(prompt, "prompt", most_tokens)
            return
        _check_length(prompt, "prompt", self._limits.max_prompts, "prompts")
        for number, one in enumerate(prompt):
            if isinstance(one, list):
                self._check_tokens(one, f"prompt.{number}", most_tokens)

    def _check_tokens(self, tokens: list[Any], field: str, most_tokens: int) -> None:
        if len(tokens) > most_tokens:
            what, limit = f"{field} has {len(tokens)} tokens", self._max_model_len - 1
            raise ContextTooLong.of(what, self._max_model_len, field=field, asked=len(tokens), limit=limit)


def check_characters(value: Any) -> None:
    """Raises `InvalidRequest` for JSON that names half a surrogate pair: nothing can be done with such a text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the body holds half of a surrogate pair ({error.object[error.start]!a}), which is no character"
        ) from None


def shown(value: Any, most_chars: int = 80) -> str:
    """A value as it was sent, cut to a length that one can read; it is never printed as a whole."""
    text = repr(value[:most_chars]) if isinstance(value, str | bytes) else _short.repr(value)
    return text if len(text) <= most_chars else f"{text[: most_chars - 4]} ..."


class _Short(reprlib.Repr):
    """Objects in the order in which they came."""

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        parts = [f"{self.repr1(name, level - 1)}: {self.repr1(x[name], level - 1)}" for name in [*x][: self.maxdict]]
        return "{" + ", ".join([*parts, *(["..."] if len(x) > self.maxdict else [])]) + "}"


_short = _Short()
_short.maxlist = _short.maxdict = 20
_short.maxstring = _short.maxlong = _short.maxother = 90
_short.maxlevel = 4


def _check_members(value: Mapping[str, Any], what: str, field: str | None, limit: int) -> None:
    if len(value) > limit:
        raise InvalidRequest(
            f"{what} has {len(value)} members; at most {limit} may be", field=field, asked=len(value), limit=limit
        )


def _check_length(value: Any, field: str, limit: int, what: str) -> None:
    if isinstance(value, list) and len(value) > limit:
        raise InvalidRequest(
            f"{field} has {len(value)} {what}; at most {limit} may be", field=field, asked=len(value), limit=limit
        )


def _check_parts(content: Any, field: str, limit: int) -> None:
    """Of a message, and of the results of tools among them."""
    _check_length(content, field, limit, "parts")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict):
            _check_length(part.get("content"), f"{field}.{number}.content", limit, "parts")


def _no_json(reason: str, position: int) -> RequestValidationError:
    fault = {"type": "json_invalid", "loc": ("body", position), "msg": reason, "input": {}, "ctx": {"error": reason}}
    return RequestValidationError([fault], body=None)
