"""Engines as replicas of a Ray Serve deployment.

    serve run intarsia.deploy.serve_app:app model=path/to/checkpoint tensor_parallel_size=2 num_replicas=2

or `serve deploy` with a file like deploy/cluster/serve.yaml. Every replica has an engine of its own: a controller and
its workers. What it answers is what `intarsia serve` answers, HTTP and gRPC.
"""

import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pydantic
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingPolicy
from ray.serve.grpc_util import RayServegRPCContext

from ..environment import freeze_startup_objects, give_back_large_blocks
from ..errors import EngineUnavailable, IntarsiaError, InvalidSetting
from ..proto import inference_pb2 as pb
from ..proto.tracing import tracer_of
from .anthropic.app import add_messages
from .front_end.access import Access, Level
from .front_end.front_end import FrontEnd
from .front_end.request_log import LOGGED, RequestLog, logged
from .front_end.router import Router
from .front_end.tokenizer import Tokenizer
from .grpc.door import noting, status_of
from .grpc.server import SERVICE, InferenceServicer
from .openai.app import make_app
from .settings.options import engine_settings
from .settings.table import ENGINE, LIMITS, SERVER
from .settings.typed import fault_of, typed
from .start.autoscaling import POOL_USE, wanted_replicas
from .start.launch import RunningEngine, find_engines, start_engine
from .start.serve import ServerSettings, server_settings

MAX_ONGOING_REQUESTS = 1024
"""The most requests of a replica. The engine queues by itself, in its own order; Serve should not do so before it."""

STREAM_INTERVAL_S = 0.1
"""Time between the pieces of a streamed answer: each is a message between Serve's processes, which take as long for one
as a small model for a token. A reader sees text flow ten times a second."""

BEHIND_A_PROXY = {
    "api_key_file",
    "admin_key_file",
    "console_prompts",
    "image_hosts",
    "open_objects",
    "prepare_next_turns",
    "request_log",
    "tool_call_parser",
    "reasoning_parser",
}
"""Settings of a server that hold behind Serve's proxy, too, beside the interval and the limits. Files are those of the
replicas' nodes."""

OF_ENGINE = {row.name: row for row in ENGINE}
OF_SERVER = {row.name: row for row in SERVER if row.name in BEHIND_A_PROXY | {"stream_interval_s"} or row in LIMITS}


class DeploymentOptions(pydantic.BaseModel):
    """What `app` takes beside settings of an engine and its server: how many replicas, and how they come and go."""

    model_config = pydantic.ConfigDict(extra="forbid")

    num_replicas: int = pydantic.Field(1, ge=1, description="Where they are not scaled.")
    max_replicas: int | None = pydantic.Field(None, ge=1, description="Scale up to so many, as autoscaling.py has it.")
    min_replicas: int = pydantic.Field(1, ge=0)
    target_ongoing_requests: float = pydantic.Field(32.0, gt=0, description="In flight per replica, when scaled.")
    upscale_delay_s: float = pydantic.Field(30.0, ge=0, description="How long more must be wanted before it comes.")
    downscale_delay_s: float = pydantic.Field(600.0, ge=0, description="How long less must be wanted before one goes.")
    drain_timeout_s: float = pydantic.Field(600.0, ge=0, description="What a replica that goes has for its streams.")
    max_ongoing_requests: int = pydantic.Field(MAX_ONGOING_REQUESTS, ge=1)


@serve.deployment(
    health_check_period_s=5,
    health_check_timeout_s=60,  # a replica whose event loop is busy for a while is not sick
    graceful_shutdown_wait_loop_s=1,
)
@serve.ingress()
class Replica:
    """One engine and its front end, within a Serve replica."""

    async def __init__(self, settings: dict[str, Any], server: ServerSettings, drain_timeout_s: float):
        given: dict[str, Any] = {"max_wait_s": OF_ENGINE["max_wait_s"].for_servers} | settings
        wanted = engine_settings(**given)
        self._access = Access(server.access)
        self._server, self._drain_timeout_s = server, drain_timeout_s
        name = engine_name(wanted.name, settings)
        wanted = replace(wanted, name=name)
        tokenizer = Tokenizer.of(wanted.model)
        self._engine: RunningEngine | None = await start_engine(wanted)
        alike = name.rpartition("-")[0]
        self._router = Router(self._engine.client, name, partial(find_engines, f"{alike}-"))
        self._front_end = FrontEnd(
            self._engine.client,
            tokenizer,
            server.front_end,
            self._router,
            tracer_of("front-end", wanted.model.traces_endpoint),
            server.limits,
        )
        self._servicer = InferenceServicer(self._front_end)
        self._request_log = RequestLog(server.request_log) if server.request_log else None
        give_back_large_blocks()
        freeze_startup_objects()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(
            lambda: self._front_end,
            self._access,
            self._server.console,
            self._server.limits,
            request_log=self._request_log,
            interfaces=(add_messages,),
            tells_ids=False,  # Serve's proxy gives each request an id, and tells it
        )

    async def check_health(self) -> None:
        """Called by Serve. An engine that is gone makes the replica start again; a busy one does not."""
        engine = self._engine
        failure = engine.client.connection.failure if engine else EngineUnavailable("the engine was shut down")
        if failure is not None:
            raise failure

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for `autoscaling.wanted_replicas`."""
        return {POOL_USE: (await self._front_end.load()).pool_use}

    async def __del__(self) -> None:
        """Called by Serve when the replica is to end, its requests being done."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(IntarsiaError):  # it is gone already
                await engine.leave(self._drain_timeout_s)  # other replicas' front ends may have requests there
            await self._router.close()
            await engine.shutdown()

    # -- gRPC: Serve calls the method of the RPC's name --------------------------------------------------------------

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async for response in self._stream(self._servicer.Generate, request, grpc_context):
            yield response

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateBatchResponse, None]:
        async for response in self._stream(self._servicer.GenerateBatch, request, grpc_context):
            yield response

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenIds:
        return await self._answer(self._servicer.Tokenize, request, grpc_context)

    async def Detokenize(self, request: pb.TokenIds, grpc_context: RayServegRPCContext) -> pb.DetokenizeResponse:
        return await self._answer(self._servicer.Detokenize, request, grpc_context)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, grpc_context: RayServegRPCContext) -> pb.ModelInfo:
        return await self._answer(self._servicer.GetModelInfo, request, grpc_context)

    async def GetLoad(self, request: pb.GetLoadRequest, grpc_context: RayServegRPCContext) -> pb.Load:
        """Answers for the replica that Serve picks."""
        return await self._answer(self._servicer.GetLoad, request, grpc_context, Level.FIGURES)

    async def GetCacheState(self, request: pb.GetCacheStateRequest, grpc_context: RayServegRPCContext) -> pb.CacheState:
        """Answers for the replica that Serve picks."""
        return await self._answer(self._servicer.GetCacheState, request, grpc_context, Level.FIGURES)

    async def ListLeases(self, request: pb.ListLeasesRequest, grpc_context: RayServegRPCContext) -> pb.Leases:
        """Of all replicas."""
        return await self._answer(self._servicer.ListLeases, request, grpc_context, Level.FIGURES)

    async def ReleaseLease(
        self, request: pb.ReleaseLeaseRequest, grpc_context: RayServegRPCContext
    ) -> pb.ReleaseLeaseResponse:
        """At whichever replica it is."""
        return await self._answer(self._servicer.ReleaseLease, request, grpc_context, Level.FIGURES)

    async def Probe(self, request: pb.ProbeRequest, grpc_context: RayServegRPCContext) -> pb.ProbeResponse:
        """Answers for all replicas."""
        return await self._answer(self._servicer.Probe, request, grpc_context, Level.FIGURES)

    async def WatchCacheEvents(
        self, request: pb.WatchCacheEventsRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.CacheEvents, None]:
        """Answers for the replica that Serve picks."""
        async for events in self._stream(self._servicer.WatchCacheEvents, request, grpc_context, Level.FIGURES):
            yield events

    async def _answer(
        self,
        method: Callable[..., Awaitable[Any]],
        request: Any,
        context: RayServegRPCContext,
        level: Level = Level.KEY,
    ) -> Any:
        """What our servicer says to a call that brings a key, where one is wanted."""
        with noting() as refused:
            self._check(context, level)
            return await method(request, _Context(context))
        raise _refused(context, refused.pop())

    async def _stream(
        self,
        method: Callable[..., AsyncIterator[Any]],
        request: Any,
        context: RayServegRPCContext,
        level: Level = Level.KEY,
    ) -> AsyncGenerator[Any, None]:
        """Answer a call of a method with many answers."""
        path = f"/{SERVICE}/{method.__name__}"
        with noting() as refused, logged(self._request_log if path in LOGGED else None, path):
            self._check(context, level)
            async with contextlib.aclosing(method(request, _Context(context))) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        if refused:
            raise _refused(context, refused.pop())

    def _check(self, context: RayServegRPCContext, level: Level) -> None:
        self._access.check(level, dict(context.invocation_metadata()).get("authorization"))


def _refused(context: RayServegRPCContext, error: IntarsiaError) -> RuntimeError:
    """The exception that ends a call of Serve's, with its status set."""
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(list(status.trailing_metadata or ()))  # type: ignore[arg-type]  bytes too
    return RuntimeError(status.details)


def engine_name(name: str | None, settings: Mapping[str, Any]) -> str:
    """The name of a replica's engine. All that comes before the last hyphen is common to replicas that serve the
    same."""
    here = serve.get_replica_context()
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]
    return f"{name or here.app_name}-{here.deployment}-{digest}-{here.replica_id.unique_id}"


class _Context:
    """Serve's context of a gRPC call, as our servicer knows contexts."""

    def __init__(self, context: RayServegRPCContext):
        self._context = context

    def invocation_metadata(self) -> Any:
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        return None  # Serve does not tell; it ends calls whose deadline has passed


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application of `serve run`. args: settings of an engine and its server, and `DeploymentOptions`, as texts or
    values.

    Raises `InvalidSetting`, naming the field, before anything starts.
    """
    settings, server, options = _split(args)
    # What can be refused at once is refused here.
    usual = {"stream_interval_s": STREAM_INTERVAL_S, "max_streams": options.max_ongoing_requests}
    of_server = server_settings(**usual | server)
    engine_settings(**settings)  # last, because it fetches a model that is not here
    # A fixed number of replicas, or as many as the load wants.
    scaling: dict[str, Any] = {"num_replicas": options.num_replicas}
    if options.max_replicas is not None:
        scaling = {
            "num_replicas": "auto",
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": max(options.max_replicas, options.min_replicas),
                "target_ongoing_requests": options.target_ongoing_requests,
                "upscale_delay_s": options.upscale_delay_s,
                "downscale_delay_s": options.downscale_delay_s,
                "policy": AutoscalingPolicy(policy_function=wanted_replicas),
            },
        }
    made: Any = Replica
    configured = made.options(
        max_ongoing_requests=options.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.drain_timeout_s,
        **scaling,
    )
    return configured.bind(settings, of_server, options.drain_timeout_s)


def _split(args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], DeploymentOptions]:
    """Settings of the engine and of its server, in their types, and the rest."""
    if "model" not in args:
        raise InvalidSetting("model is missing: serve run intarsia.deploy.serve_app:app model=PATH", field="model")
    of_options = DeploymentOptions.model_fields
    given = typed([*OF_ENGINE.values(), *OF_SERVER.values()], args, [*of_options])
    try:
        options = DeploymentOptions(**{name: value for name, value in args.items() if name in of_options})
    except pydantic.ValidationError as error:
        raise fault_of(error) from None
    server = {name: given.pop(name) for name in OF_SERVER if name in given}
    return given, server, options
