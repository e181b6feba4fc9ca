"""A front end's connection to the engine: requests go in, token deltas come out."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence

from ..errors import EngineUnavailable, IntarsiaError, InvalidRequest
from ..proto.channel import Address, ChannelClosed, Stream
from .engine import TokenDelta, TokenLogprobs
from .front_door import decode
from .images import Image
from .info import EngineInfo
from .request import SamplingParams

__all__ = ["EngineClient", "TokenDelta", "TokenLogprobs"]


class EngineClient:
    """Many concurrent requests over one connection. Lives on one event loop."""

    def __init__(self, stream: Stream, info: EngineInfo):
        self.info = info
        self._stream = stream
        self._inboxes: dict[str, asyncio.Queue[TokenDelta | IntarsiaError]] = {}
        self._failure: IntarsiaError | None = None
        self._gone = asyncio.Event()
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, address: Address) -> "EngineClient":
        try:
            stream = await Stream.connect(address)
            info = EngineInfo.from_wire(await stream.receive_message())
        except (ChannelClosed, OSError) as error:
            raise EngineUnavailable(
                f"the engine at {address.host}:{address.port} can not be reached: {error}"
            ) from error
        return cls(stream, info)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        images: Sequence[Image] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Tokens of one request as they come. Closing the generator before its end aborts the request.

        Raises `InvalidRequest` (or `RequestTooLarge`) when the request is refused, `EngineUnavailable` when the
        engine is gone.
        """
        if self._failure is not None:
            raise self._failure
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._inboxes:
            raise InvalidRequest(f"request id {request_id!r} is in use", field="request_id")
        inbox = self._inboxes[request_id] = asyncio.Queue()
        finished = False
        try:
            self._stream.send_message(["submit", request_id, list(prompt_token_ids), sampling.to_wire(), images])
            while not finished:
                item = await inbox.get()
                finished = isinstance(item, IntarsiaError) or item.finish_reason is not None
                if isinstance(item, IntarsiaError):
                    raise item
                yield item
        finally:
            del self._inboxes[request_id]
            if not finished and self._failure is None:
                self._stream.send_message(["abort", request_id])

    async def wait_gone(self) -> IntarsiaError:
        """Wait until the engine can not be reached any more; why that is."""
        await self._gone.wait()
        assert self._failure is not None
        return self._failure

    async def close(self) -> None:
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._fail(EngineUnavailable("the connection to the engine was closed"))
        await self._stream.close()

    async def _receive(self) -> None:
        try:
            while True:
                for entry in await self._stream.receive_message():
                    request_id, item = decode(entry)
                    if request_id in self._inboxes:  # else: aborted here, and the engine had not heard of it yet
                        self._inboxes[request_id].put_nowait(item)
        except ChannelClosed:
            self._fail(EngineUnavailable("the engine has gone; start it again, or wait until it is back"))

    def _fail(self, error: IntarsiaError) -> None:
        self._failure = self._failure or error
        self._gone.set()
        for inbox in self._inboxes.values():
            inbox.put_nowait(error)
