"""The gRPC server: how a request enters, how a bad one is refused, how tokens leave."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from ..errors import IntarsiaError, InvalidRequest, InvalidSetting, Unauthenticated
from ..proto import inference_pb2 as pb
from ..proto import inference_pb2_grpc as pb_grpc
from ..proto.tracing import INCOMING
from .access import RPCS, Access, Level
from .convert import (
    MAX_MESSAGE_BYTES,
    cache_state_to_proto,
    error_to_proto,
    error_to_status,
    events_to_proto,
    info_to_proto,
    load_to_proto,
    response_to_proto,
    sampling_from_proto,
    terms_from_proto,
)
from .front_end import Asked, FrontEnd, side_by_side
from .unread import taken_in_time

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
)

SHUTDOWN_GRACE_S = 5.0

LAST_WORD_S = 1.0
"""To tell a client that does not read why its call ends. gRPC keeps it for when it does."""


class InferenceServicer(pb_grpc.InferenceServicer):
    """Answers `intarsia.v1.Inference` out of one engine."""

    def __init__(self, front_end: FrontEnd):
        self._front_end = front_end

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        # Closing them is what frees the blocks of a client that has gone.
        _note_trace(context)
        answered = contextlib.aclosing(self._answered(request, context.time_remaining()))
        async with _refusing(context), answered as responses, self._taken(responses, context) as taken:
            async for response in taken:
                yield response

    def model_info(self) -> pb.ModelInfo:
        return info_to_proto(self._front_end.info)

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        async with _refusing(context):
            time_remaining_s = context.time_remaining()
            _note_trace(context)
            streams = [self._answered(one, time_remaining_s) for one in request.requests]
            answered = contextlib.aclosing(side_by_side(streams))
            async with answered as together, self._taken(together, context) as taken:
                async for number, item in taken:
                    if isinstance(item, IntarsiaError):
                        yield pb.GenerateBatchResponse(request=number, error=error_to_proto(item))
                    else:
                        yield pb.GenerateBatchResponse(request=number, response=item)

    def _taken(self, items: AsyncIterator[Any], context: Any) -> contextlib.aclosing[AsyncGenerator[Any, None]]:
        """The same, until the client has not read for too long."""
        call = asyncio.current_task()
        return contextlib.aclosing(
            taken_in_time(
                items, self._front_end.limits, lambda error: asyncio.ensure_future(_give_up(call, context, error))
            )
        )

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(found=self._front_end.abort(request.request_id))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenIds:
        add = request.add_special_tokens if request.HasField("add_special_tokens") else True
        async with _refusing(context):
            return pb.TokenIds(ids=await self._front_end.encode(request.text, add_special_tokens=add))
        raise AssertionError("refused")

    async def Detokenize(self, request: pb.TokenIds, context: Any) -> pb.DetokenizeResponse:
        async with _refusing(context):
            return pb.DetokenizeResponse(text=self._front_end.decode(request.ids))
        raise AssertionError("refused")

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.Load:
        async with _refusing(context):
            return load_to_proto(await self._front_end.load())
        raise AssertionError("refused")

    async def GetCacheState(self, request: pb.GetCacheStateRequest, context: Any) -> pb.CacheState:
        async with _refusing(context):
            return cache_state_to_proto(await self._front_end.cache_state())
        raise AssertionError("refused")

    async def WatchCacheEvents(
        self, request: pb.WatchCacheEventsRequest, context: Any
    ) -> AsyncIterator[pb.CacheEvents]:
        async with _refusing(context), contextlib.aclosing(self._front_end.watch_cache()) as watch:
            async for events in watch:
                yield events_to_proto(events)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        return self.model_info()

    async def _answered(
        self, request: pb.GenerateRequest, time_remaining_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        asked = await self._asked(request, time_remaining_s)
        completion_tokens = 0
        async with contextlib.aclosing(await self._front_end.generate(asked)) as answers:
            async for delta, text in answers:
                completion_tokens += len(delta.token_ids)
                yield response_to_proto(answers.request_id, delta, text, len(asked.prompt), completion_tokens)

    async def _asked(self, request: pb.GenerateRequest, time_remaining_s: float | None) -> Asked:
        sampling = sampling_from_proto(request.sampling, self._front_end.info)
        terms = terms_from_proto(request, time_remaining_s)
        self._front_end.check_room(terms.tenant)
        prompt = await self._prompt(request)
        images = await self._front_end.read_images(request.images)
        return Asked(prompt, sampling, images, terms, request.request_id)

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequest("the request has no prompt; give text or token_ids", field="prompt")
        if kind == "token_ids":
            return list(request.token_ids.ids)
        return await self._front_end.encode(request.text)


class GrpcServer:
    """The service with health and reflection."""

    def __init__(self, front_end: FrontEnd, access: Access | None = None):
        self._access = access or Access()
        self._server = grpc.aio.server(interceptors=[_Keys(self._access)], options=OPTIONS)
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        pb_grpc.add_InferenceServicer_to_server(InferenceServicer(front_end), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str = "127.0.0.1", port: int = 50051) -> str:
        """Listen; port 0 takes a free one. Returns the address. Raises `InvalidSetting` if that can not be."""
        self._access.check_host(host)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            credentials = self._access.grpc_credentials()
            if credentials is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, credentials)
        except RuntimeError as error:
            raise InvalidSetting(
                f"can not listen on {target}: the port is in use or not allowed. Choose another --grpc-port, or 0 "
                "for a free one.",
                field="grpc_port",
                asked=port,
            ) from error
        await self._server.start()
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return f"{target.rpartition(':')[0]}:{port}"

    async def leave(self) -> None:
        """Say to health watchers that requests are to go elsewhere."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """Say so to health watchers, take nothing new, give running calls `grace_s` to end."""
        await self.leave()
        await self._server.stop(grace_s)


def _note_trace(context: Any) -> None:
    """In which trace a call comes, if in any."""
    INCOMING.set(str(dict(context.invocation_metadata() or ()).get("traceparent", "")))


class _Keys(grpc.aio.ServerInterceptor):
    """Lets calls pass that bring a key, where one is wanted."""

    def __init__(self, access: Access):
        self._access = access

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        level = RPCS.get(handler_call_details.method, Level.KEY)
        try:
            self._access.check(level, dict(handler_call_details.invocation_metadata).get("authorization"))
        except Unauthenticated as error:
            return _refusal(error)
        handler = await continuation(handler_call_details)
        return _reading(handler) if handler is not None and not handler.request_streaming else handler


class _Unreadable(NamedTuple):
    """Bytes that are no message."""

    why: str


def _reading(handler: Any) -> Any:
    """The same handler, which answers bytes that are no message as what they are: gRPC calls it an unknown error."""
    if handler.request_deserializer is None:
        return handler

    def read(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    async def refuse(request: _Unreadable, context: Any) -> None:
        error = InvalidRequest(f"the request's bytes are no message of its kind: {request.why}")
        await context.abort_with_status(status_of(error))

    if handler.response_streaming:

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            if isinstance(request, _Unreadable):
                await refuse(request, context)
            async with contextlib.aclosing(handler.unary_stream(request, context)) as responses:
                async for response in responses:
                    yield response

        return handler._replace(request_deserializer=read, unary_stream=stream)

    async def answer(request: Any, context: Any) -> Any:
        if isinstance(request, _Unreadable):
            await refuse(request, context)
        return await handler.unary_unary(request, context)

    return handler._replace(request_deserializer=read, unary_unary=answer)


def _refusal(error: IntarsiaError) -> Any:
    """A handler that does nothing else, for calls of any kind."""

    async def refuse(request: bytes, context: Any) -> None:
        await context.abort_with_status(status_of(error))

    return grpc.unary_unary_rpc_method_handler(refuse)  # type: ignore[arg-type]


async def _give_up(call: asyncio.Task[Any] | None, context: Any, error: IntarsiaError) -> None:
    """End a call whose client does not read: it waits in the middle of a write."""
    logger.warning("a call is given up: %s", error)
    with contextlib.suppress(Exception):  # it can not be told now, or it was, which gRPC raises as well
        async with asyncio.timeout(LAST_WORD_S):
            await context.abort_with_status(status_of(error))
    if call is not None:
        call.cancel()


class _Status(NamedTuple):
    """What ends a call, as gRPC wants it."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


@contextlib.asynccontextmanager
async def _refusing(context: Any) -> AsyncIterator[None]:
    """Our errors become statuses with details; anything else is our own fault, and only the log learns of it."""
    try:
        yield
    except IntarsiaError as known:
        error = known
    except Exception:
        logger.exception("a call failed on an internal error")
        error = IntarsiaError("internal error; the server's log has the details")
    else:
        return
    await context.abort_with_status(status_of(error))


def status_of(error: IntarsiaError) -> Any:
    """An error as what a call ends with."""
    status: Any = rpc_status.to_status(error_to_status(error))
    metadata = tuple(status.trailing_metadata)
    if error.retry_after_s is not None:  # what clients with a retry policy go by
        metadata += (("grpc-retry-pushback-ms", str(round(error.retry_after_s * 1000))),)
    return _Status(status.code, status.details, metadata)
