"""A line answered by the very application that answers HTTP, called in this process."""

import asyncio
import json
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from ..settings.limits import Limits
from .lines import Line, Refused, read_line, refusal, result

logger = logging.getLogger(__name__)

OFFLINE = Limits(max_key_bodies_bytes=1 << 40)
"""The limits of front ends that answer batches: lines of any length may wait to be read, since there are no other
clients."""

TRY_AGAIN = (429, 503)
"""The engine is busy or gone: nothing is wrong with the request."""

WAITS_S = (0.1, 0.5, 2.0, 5.0)
"""The waits before each further try."""


async def answer(app: ASGIApp, text: bytes, number: int) -> str | None:
    """The result of a line, itself a line of JSON; None when the engine cannot answer, however often it is asked."""
    line = read_line(text, number)
    if isinstance(line, Refused):
        return refusal(line)
    for wait_s in (*WAITS_S, None):
        status, body = await post(app, line)
        if status not in TRY_AGAIN:
            return result(line, status, body)
        if wait_s is not None:
            await asyncio.sleep(wait_s)
    return None


async def post(app: ASGIApp, line: Line) -> tuple[int, Any]:
    """(status, body) of a request."""
    payload = json.dumps(line.body).encode()
    headers = {
        b"content-type": b"application/json",
        b"content-length": str(len(payload)).encode(),
        b"x-request-id": line.request_id.encode(),
    }
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers.items()),
        "client": None,
        "server": None,
    }
    status, parts = 500, []
    unread = [{"type": "http.request", "body": payload, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # the client stays connected and sends nothing more
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # a bug, for which the application has answered 500 already
        logger.exception("line %s could not be answered", line.custom_id)
    return status, json.loads(b"".join(parts) or b"null")
