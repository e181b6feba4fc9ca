"""The gRPC server: how a request enters, how a bad one is refused, how tokens leave."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from ...errors import IntarsiaError, InvalidRequest
from ...proto import inference_pb2 as pb
from ...proto import inference_pb2_grpc as pb_grpc
from ...proto.reply import Delta, num_values
from ...proto.tracing import INCOMING
from ..front_end.access import TENANT, Access
from ..front_end.front_end import Asked, FrontEnd, side_by_side
from ..front_end.request_log import RequestLog
from ..front_end.served_models import ServedModels, models_of
from ..settings.limits import check_id
from ..settings.ports import listening, refusal
from .bounds import SERVICE, bounds_of, options_of
from .by_model import servicer_of
from .convert import (
    FINISH_REASONS,
    check_lists,
    error_to_proto,
    logprobs_to_proto,
    most_batch_requests,
    options_from_proto,
    probed_to_proto,
    sampling_from_proto,
    usage_to_proto,
)
from .door import Door, WrittenCall
from .figures import FiguresServicer
from .health import HEALTH, HealthServicer
from .reflection import add_reflection

SHUTDOWN_GRACE_S = 5.0

Result = TypeVar("Result")

MANY_TOKENS = 10_000
"""To make a list or a text of them takes a millisecond or more; it is done beside the loop."""


class InferenceServicer(FiguresServicer):
    """Answers `intarsia.v1.Inference` out of one engine. Raises `IntarsiaError`, of which its caller makes a status."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        # Closing them is what frees the blocks of a client that has gone.
        _note_trace(context)
        async with contextlib.aclosing(self._answered(request, context.time_remaining())) as responses:
            async for response in responses:
                yield response

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Any
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        time_remaining_s = context.time_remaining()
        _note_trace(context)
        most_batch_requests(self._front_end.limits).check(len(request.requests))
        streams = [self._answered(one, time_remaining_s) for one in request.requests]
        async with contextlib.aclosing(side_by_side(streams)) as together:
            async for number, item in together:
                if isinstance(item, IntarsiaError):
                    yield pb.GenerateBatchResponse(request=number, error=error_to_proto(item))
                else:
                    yield pb.GenerateBatchResponse(request=number, response=item)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        check_id(request.request_id, self._front_end.limits)
        return pb.AbortResponse(found=self._front_end.abort(request.request_id))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenIds:
        add = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return pb.TokenIds(ids=await self._front_end.encode(request.text, add_special_tokens=add, only_counted=True))

    async def Detokenize(self, request: pb.TokenIds, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=await self._front_end.detokenize(request.ids))

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        prompt = await self._prompt(request)
        return probed_to_proto(len(prompt), await self._front_end.probes.ask(prompt, request.cache_salt))

    async def _answered(
        self, request: pb.GenerateRequest, time_remaining_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        asked = await self._asked(request, time_remaining_s)
        completion_tokens = 0
        async with contextlib.aclosing(await self._front_end.generate(asked)) as answers:
            async for delta, text in answers:
                completion_tokens += len(delta.token_ids)
                made = partial(response_to_proto, answers.request_id, delta, text, len(asked.prompt), completion_tokens)
                if delta.logprobs or delta.prompt_logprobs:
                    values = num_values(delta.logprobs) + num_values(delta.prompt_logprobs)
                    yield await self._front_end.aside(values, made)
                else:
                    yield made()

    async def _asked(self, request: pb.GenerateRequest, time_remaining_s: float | None) -> Asked:
        check_lists(request, self._front_end.limits, self._front_end.info)
        sampling = sampling_from_proto(request.sampling, self._front_end.info)
        options = options_from_proto(request, time_remaining_s)
        self._front_end.check_room(options.tenant)
        prompt = await self._prompt(request)
        images = await self._front_end.read_images(request.images)
        return Asked(prompt, sampling, images, options, request.request_id)

    async def _prompt(self, request: pb.GenerateRequest | pb.ProbeRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequest("the request has no prompt; give text or token_ids", field="prompt")
        if kind == "token_ids":
            return await self._beside(len(request.token_ids.ids), lambda: list(request.token_ids.ids))
        return await self._front_end.encode(request.text)

    async def _beside(self, tokens: int, work: Callable[[], Result]) -> Result:
        """What it returns; beside the loop, if it goes through many tokens."""
        return work() if tokens < MANY_TOKENS else await self._front_end.beside.run(TENANT.get(), work, 8 * tokens)


class GrpcServer:
    """The service with health and reflection."""

    def __init__(
        self, served: FrontEnd | ServedModels, access: Access | None = None, request_log: RequestLog | None = None
    ):
        self._models, self._access = models_of(served), access or Access()
        here = self._models.roomiest
        limits, bounds = here.limits, bounds_of(here.limits, here.info)
        servicer, choose = servicer_of(self._models, InferenceServicer)
        door = Door(self._access, limits, here.beside, bounds, _write, request_log, choose)
        self._server = grpc.aio.server(interceptors=[door], options=options_of(limits))
        self._health = HealthServicer(("", SERVICE), limits.max_keyless_connections)
        pb_grpc.add_InferenceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_reflection((SERVICE, HEALTH), self._server)

    async def start(self, host: str = "127.0.0.1", port: int = 50051) -> str:
        """Listen; port 0 takes a free one. Returns the address. Raises `InvalidSetting` if that cannot be."""
        self._access.check_host(host)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        listening(host, port, "grpc_port").close()  # gRPC says why it cannot in a line of its own
        credentials = self._access.grpc_credentials()
        try:
            if credentials is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, credentials)
        except RuntimeError as error:  # another process was quicker
            raise refusal(host, port, "grpc_port", error) from error
        await self._server.start()
        self._health.follow(self._models.each())
        return f"{target.rpartition(':')[0]}:{port}"

    async def leave(self) -> None:
        """Say to health watchers that requests are to go elsewhere."""
        self._health.leave()

    async def stop(self, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """Say so to health watchers, take nothing new, give running calls `grace_s` to end."""
        await self.leave()
        await self._server.stop(grace_s)


def response_to_proto(
    request_id: str, delta: Delta, text: str, prompt_tokens: int, completion_tokens: int
) -> pb.GenerateResponse:
    """One piece of an answer. The last one says what the answer took."""
    response = pb.GenerateResponse(
        request_id=request_id,
        token_ids=delta.token_ids,
        text=text,
        finish_reason=FINISH_REASONS[delta.finish_reason],
        logprobs=[logprobs_to_proto(row) for row in delta.logprobs or ()],
        index=delta.answer,
        prompt_logprobs=[logprobs_to_proto(row) for row in delta.prompt_logprobs or ()],
    )
    if delta.finish_reason is not None:
        response.usage.CopyFrom(usage_to_proto(delta, prompt_tokens, completion_tokens))
    return response


async def _write(responses: AsyncGenerator[Any, None], call: WrittenCall) -> None:
    """Write what a method answers. While a piece waits for its client, the call says since when."""
    async with contextlib.aclosing(responses):
        async for response in responses:
            call.waiting_since_s = time.monotonic()
            await call.context.write(response)
            call.waiting_since_s = None


def _note_trace(context: Any) -> None:
    """In which trace a call comes, if in any."""
    INCOMING.set(str(dict(context.invocation_metadata() or ()).get("traceparent", "")))
