"""What stands before the application: who may come in, and how much of a body is read.

Both judge the path below `root_path`, as the routes do: a proxy or Serve may show the application at another place.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import IntarsiaError, InvalidRequest
from ...proto.tracing import INCOMING
from ..front_end.access import ROUTES, Access, Level
from ..front_end.request_log import RequestLog
from ..http.called import REQUEST_ID, Called
from ..http.connections import Held, Share
from ..http.protocol import CONNECTION
from ..settings.limits import Limits, check_id
from .errors import refusal, refused
from .reading import RELEASE

UNASKED = ("GET", "HEAD", "OPTIONS")
"""What these ask for costs little, and is asked for again and again by what watches a server."""

KEY = "intarsia.key"
"""The entry of a scope with the digest of its key."""

WINDOW_S = 10.0
"""A body must come at the lowest rate or faster in each window: a fast beginning does not excuse a slow end."""


class Named:
    """Gives each request an id, and tells it with the answer. HEAD is answered as GET is, without what follows the
    head, which servers leave out."""

    def __init__(self, app: ASGIApp, limits: Limits, *, tells_ids: bool):
        self._app = app
        self._limits = limits
        self._tells_ids = tells_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        called = Called(self._id_of(scope) or uuid.uuid4().hex)
        inner = {**scope, "method": method, REQUEST_ID: called}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and self._tells_ids:
                header = (b"x-request-id", called.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(inner, receive, send_named)

    def _id_of(self, scope: Scope) -> str:
        """The id in a request's header; empty if there is none, or none that is valid."""
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        try:
            check_id(given, self._limits)
        except InvalidRequest:
            return ""  # who asks the model is told, and the rest has no use for it
        return given


class Logged:
    """Has a line of each request written that asks for something."""

    def __init__(self, app: ASGIApp, log: RequestLog):
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in UNASKED:
            await self._app(scope, receive, send)
            return
        called = scope[REQUEST_ID]
        with self._log.one(get_route_path(scope)) as record:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    record.status = message["status"]
                await send(message)

            try:
                await self._app(scope, receive, send_noted)
            finally:
                record.request_id = called.id  # which its body may have said


class Place:
    """Where a proxy shows the application. Some proxies take that part of a path away, others leave it there."""

    def __init__(self, app: ASGIApp, root_path: str):
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root, path = self._root_path, scope["path"]
            is_there = path == root or path.startswith(f"{root}/")
            scope = {**scope, "root_path": root, "path": path if is_there else root + path}
        await self._app(scope, receive, send)


class Keys:
    """Lets requests pass that bring a key, where one is wanted; notes in which trace they come."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        INCOMING.set(headers.get(b"traceparent", b"").decode("latin-1"))
        if scope["type"] == "http":
            level = ROUTES.get(get_route_path(scope), Level.KEY)  # a model's path has its name in it, and that level
            try:
                scope[KEY] = self._access.check(level, _authorization(headers))
                if scope[KEY] and CONNECTION in scope:
                    scope[CONNECTION].name(scope[KEY])
            except IntarsiaError as error:
                await refusal(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(headers: Mapping[bytes, bytes]) -> str:
    """With the key, which Anthropic's clients send in a header of its own."""
    given = headers.get(b"authorization", b"")
    if not given and b"x-api-key" in headers:
        given = b"Bearer " + headers[b"x-api-key"]
    return given.decode("latin-1")


class Bodies:
    """Reads a body as a whole when it is asked for, unless it is too large, too slow, or too much beside others."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app = app
        self._limits = limits
        self._held = Held(limits)  # where no server of ours counts heads, too

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limits.max_body_bytes
        length = dict(scope["headers"]).get(b"content-length", b"0")
        with contextlib.suppress(ValueError):
            if int(length[:20]) > limit:
                message = f"the body has {length[:20].decode('latin-1')} bytes; the limit is {limit} (max_body_bytes)"
                await refused(scope, 413, message)(scope, receive, send)
                return
        held = scope[CONNECTION].held if CONNECTION in scope else self._held
        with held.share(scope.get(KEY, b"")) as share:
            scope[RELEASE] = share.give_back
            await self._app(scope, self._whole(receive, share), send)

    def _whole(self, receive: Receive, share: Share) -> Receive:
        """A `receive` that gives the body in one message."""
        is_read = False

        async def receive_whole() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return await self._read(receive, share)

        return receive_whole

    async def _read(self, receive: Receive, share: Share) -> Message:
        limits, body = self._limits, bytearray()
        window_ends_s, wanted = time.monotonic() + WINDOW_S, limits.min_body_bytes_per_s * WINDOW_S
        while True:
            # Wait for the next part until the window ends. A body that came too slowly is refused then.
            try:
                async with asyncio.timeout(max(0.0, window_ends_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                if len(body) < wanted:
                    raise HTTPException(
                        408,
                        f"{len(body)} bytes of the body have come, and it must come with {limits.min_body_bytes_per_s} "
                        f"bytes per second (min_body_bytes_per_s), looked at every {WINDOW_S:g} s",
                    ) from None
                window_ends_s = time.monotonic() + WINDOW_S
                wanted = len(body) + limits.min_body_bytes_per_s * WINDOW_S
                continue
            # The client left.
            if message["type"] != "http.request":
                return message
            # A part has come: it must fit, and its bytes count against the limits of its key.
            part, is_more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(part) > limits.max_body_bytes:
                raise HTTPException(413, f"the body has more than {limits.max_body_bytes} bytes (max_body_bytes)")
            share.take(len(part))
            if not is_more and not body:
                return message
            body += part
            if not is_more:
                return {"type": "http.request", "body": bytes(body), "more_body": False}
