"""The Python client of a served model.

with Client("127.0.0.1:50051") as client:
    for chunk in client.generate("The inlay of", SamplingParams(max_tokens=32)):
        print(chunk.text, end="", flush=True)
"""

import socket
import ssl
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_status import rpc_status

from ..errors import (
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    InvalidSetting,
    RequestTooLarge,
    Unauthenticated,
)
from ..kvcache.events import Event
from ..proto import inference_pb2 as pb
from ..proto import inference_pb2_grpc as pb_grpc
from ..proto.reply import TokenLogprobs
from ..proto.request import USUAL_TERMS, SamplingParams, Terms
from ..proto.status import CacheState, EngineInfo, EngineLoad
from .grpc.convert import (
    MAX_MESSAGE_BYTES,
    cache_state_from_proto,
    error_from_proto,
    error_from_status,
    events_from_proto,
    finish_reason_from_proto,
    info_from_proto,
    load_from_proto,
    logprobs_from_proto,
    prompt_to_proto,
    sampling_to_proto,
)

OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0))


BARE_CODES: dict[grpc.StatusCode, type[IntarsiaError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}
"""What is clear without details: Ray Serve's proxy drops them."""


HOW_WITH_KEY = "Give a key that it knows: --api-key KEY or INTARSIA_API_KEY (in Python: api_key=)"
HOW_WITH_TLS = "Say who may have signed its certificate: --ssl-ca-certs FILE (in Python: tls=Tls(ca_certs=FILE))"

TRIAL_S = 1.0
"""To find out why a server does not answer."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What has come since the last chunk, or of the whole request."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # empty unless asked for
    finish_reason: str | None  # "stop" or "length" in the last chunk
    usage: Usage | None  # in the last chunk
    index: int = 0  # of the answer, when there are several
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # in the first chunk, when asked for: of the second token and on


class Asked(NamedTuple):
    """One request of a batch."""

    prompt: str | Sequence[int]
    sampling: SamplingParams | None = None  # 16 tokens, as the checkpoint asks
    images: Sequence[bytes] = ()  # files in a usual format, one for each image token of the prompt
    request_id: str = ""
    terms: Terms = USUAL_TERMS


@dataclass(frozen=True, slots=True)
class Tls:
    """How a client meets a server with TLS. All are files in PEM."""

    ca_certs: str | None = None  # who may have signed the server's certificate; None: whom this machine trusts
    certfile: str | None = None  # the client's own certificate and its key, where the server wants one
    keyfile: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises `InvalidSetting` for files that can not be read."""
        return grpc.ssl_channel_credentials(*map(_read, (self.ca_certs, self.keyfile, self.certfile)))


class Client:
    """A connection to one server. Threads may share it."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
    ):
        """timeout_s: for each call; None waits as long as it takes."""
        self.address = address
        self._options = _call_options(timeout_s, api_key)
        self._channel = _channel(grpc, address, tls)
        self._stub = pb_grpc.InferenceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        terms: Terms = USUAL_TERMS,
    ) -> Iterator[Chunk]:
        """Tokens as they come, of all answers; each chunk says which answer it is of. Closing the iterator before its
        end stops the generation.

        sampling: None: 16 tokens, as the checkpoint asks
        images: files in a usual format, one for each image token of the prompt
        terms: priority, tenant and time limit

        Raises the server's errors as they were: `InvalidRequest`, `EngineUnavailable`, ...
        """
        request = _request(Asked(prompt, sampling, images, request_id, terms))
        call: Any = self._stub.Generate(request, **self._options)
        try:
            for response in call:
                yield _chunk(response)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None
        finally:
            call.cancel()

    def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, *, images: Sequence[bytes] = ()
    ) -> Chunk:
        """The whole answer at once. Of several answers, use `generate`."""
        _check_one(sampling)
        return _joined(list(self.generate(prompt, sampling, images=images)))

    def complete_batch(self, asked: Sequence[Asked]) -> list[Chunk | IntarsiaError]:
        """The answers to several requests, computed side by side, in their order; what is wrong with one of them stands
        in its place."""
        for one in asked:
            _check_one(one.sampling)
        batch = _Batch(len(asked))
        call: Any = self._stub.GenerateBatch(_batch_request(asked), **self._options)
        try:
            for response in call:
                batch.add(response)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None
        finally:
            call.cancel()
        return batch.outcomes()

    def abort(self, request_id: str) -> bool:
        """Stop a request of any client of the server. False if there is none of that name."""
        return self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id)).found

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call(self._stub.Tokenize, request).ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._call(self._stub.Detokenize, pb.TokenIds(ids=token_ids)).text

    def model_info(self) -> EngineInfo:
        """What is being served. `model_dir` is empty: it is the server's business."""
        return info_from_proto(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return load_from_proto(self._call(self._stub.GetLoad, pb.GetLoadRequest()))

    def cache_state(self) -> CacheState:
        """Where the blocks of the pool are."""
        return cache_state_from_proto(self._call(self._stub.GetCacheState, pb.GetCacheStateRequest()))

    def watch_cache(self) -> Iterator[list[Event]]:
        """What becomes known in the prefix cache and what is known no longer, as it happens; what is known already
        comes first, after a `Cleared`. Close the iterator to stop.

        Raises `Overloaded` when more has happened than was read.
        """
        call: Any = self._stub.WatchCacheEvents(pb.WatchCacheEventsRequest(), metadata=self._options["metadata"])
        try:
            for message in call:
                yield events_from_proto(message)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, **self._options)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None


class AsyncClient:
    """The same on an event loop; see `Client`."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
    ):
        self.address = address
        self._options = _call_options(timeout_s, api_key)
        self._channel = _channel(grpc.aio, address, tls)
        self._stub: Any = pb_grpc.InferenceStub(self._channel)  # type: ignore[arg-type]

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        terms: Terms = USUAL_TERMS,
    ) -> AsyncGenerator[Chunk, None]:
        request = _request(Asked(prompt, sampling, images, request_id, terms))
        call = self._stub.Generate(request, **self._options)
        try:
            async for response in call:
                yield _chunk(response)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None
        finally:
            call.cancel()

    async def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, *, images: Sequence[bytes] = ()
    ) -> Chunk:
        _check_one(sampling)
        return _joined([chunk async for chunk in self.generate(prompt, sampling, images=images)])

    async def complete_batch(self, asked: Sequence[Asked]) -> list[Chunk | IntarsiaError]:
        for one in asked:
            _check_one(one.sampling)
        batch = _Batch(len(asked))
        call = self._stub.GenerateBatch(_batch_request(asked), **self._options)
        try:
            async for response in call:
                batch.add(response)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None
        finally:
            call.cancel()
        return batch.outcomes()

    async def abort(self, request_id: str) -> bool:
        return (await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))).found

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return (await self._call(self._stub.Detokenize, pb.TokenIds(ids=token_ids))).text

    async def model_info(self) -> EngineInfo:
        return info_from_proto(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def load(self) -> EngineLoad:
        return load_from_proto(await self._call(self._stub.GetLoad, pb.GetLoadRequest()))

    async def cache_state(self) -> CacheState:
        return cache_state_from_proto(await self._call(self._stub.GetCacheState, pb.GetCacheStateRequest()))

    async def watch_cache(self) -> AsyncGenerator[list[Event], None]:
        call = self._stub.WatchCacheEvents(pb.WatchCacheEventsRequest(), metadata=self._options["metadata"])
        try:
            async for message in call:
                yield events_from_proto(message)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, **self._options)
        except grpc.RpcError as error:
            raise _typed(error, self.address) from None


class _Batch:
    """What came for each request of a batch."""

    def __init__(self, size: int):
        self._chunks: list[list[Chunk]] = [[] for _ in range(size)]
        self._errors: dict[int, IntarsiaError] = {}

    def add(self, response: pb.GenerateBatchResponse) -> None:
        if response.HasField("error"):
            self._errors[response.request] = error_from_proto(response.error)
        else:
            self._chunks[response.request].append(_chunk(response.response))

    def outcomes(self) -> list[Chunk | IntarsiaError]:
        return [self._errors.get(n) or _joined(chunks) for n, chunks in enumerate(self._chunks)]


def _channel(api: Any, address: str, tls: Tls | None) -> Any:
    """api: `grpc`, or `grpc.aio`"""
    if tls is None:
        return api.insecure_channel(address, options=OPTIONS)
    return api.secure_channel(address, tls.credentials(), options=OPTIONS)


def _call_options(timeout_s: float | None, api_key: str | None) -> dict[str, Any]:
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else None
    return {"timeout": timeout_s, "metadata": metadata}


def _read(file: str | None) -> bytes | None:
    try:
        return Path(file).read_bytes() if file is not None else None
    except OSError as error:
        raise InvalidSetting(f"{file} can not be read: {error.strerror}", field="tls") from None


def _request(asked: Asked) -> pb.GenerateRequest:
    """Raises `InvalidRequest` for what has no place in a message."""
    request = pb.GenerateRequest(
        request_id=asked.request_id,
        sampling=sampling_to_proto(asked.sampling) if asked.sampling is not None else None,
        images=asked.images,
        priority=asked.terms.priority,
        tenant=asked.terms.tenant,
        timeout_s=asked.terms.timeout_s,
    )
    prompt_to_proto(request, asked.prompt)
    return request


def _batch_request(asked: Sequence[Asked]) -> pb.GenerateBatchRequest:
    return pb.GenerateBatchRequest(requests=map(_request, asked))


def _check_one(sampling: SamplingParams | None) -> None:
    if sampling is not None and sampling.n > 1:
        raise InvalidRequest(f"complete returns one answer, and n is {sampling.n}; use generate", field="n")


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(row for chunk in chunks for row in chunk.logprobs),
        finish_reason=chunks[-1].finish_reason,
        usage=chunks[-1].usage,
        prompt_logprobs=chunks[0].prompt_logprobs,
    )


def _typed(error: Any, address: str) -> IntarsiaError:
    """The error as the server raised it, or what its absence means."""
    status = rpc_status.from_call(error)
    ours = error_from_status(status) if status else None
    if ours is None and error.code() in BARE_CODES:
        ours = BARE_CODES[error.code()](error.details())
    if isinstance(ours, Unauthenticated):
        return Unauthenticated(f"{address}: {ours}. {HOW_WITH_KEY}", field=ours.field, **ours.details)
    if ours is not None:
        return ours
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        lack = _lack_of_tls(error.details() or "", address)
        if lack is not None:
            return EngineUnavailable(f"{address} {lack}", field="tls")
        return EngineUnavailable(
            f"no server answers at {address}: {error.details()}. Start one with: intarsia serve MODEL_DIR",
            field="address",
        )
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # of gRPC itself: ours would carry details
        return RequestTooLarge(f"{address} does not take a message of this size: {error.details()}")
    return IntarsiaError(f"{address} answered {error.code().name}: {error.details()}")


def _lack_of_tls(details: str, address: str) -> str | None:
    """What is wrong with how a server was met, if it is TLS. details: gRPC's words."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"has a certificate that nobody known here has signed. {HOW_WITH_TLS}"
    if "WRONG_VERSION_NUMBER" in details:
        return "speaks no TLS; leave --ssl-ca-certs out (in Python: tls=)"
    if "refused" not in details and "resolution" not in details and _speaks_tls(address):
        return f"speaks TLS, and has ended the connection. {HOW_WITH_TLS}, and your own certificate if it wants one"
    return None


def _speaks_tls(address: str) -> bool:
    """Whether who listens there, if anybody does, answers as TLS does."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=TRIAL_S)
        with plain, context.wrap_socket(plain):
            return True
    except (OSError, ValueError):
        return False


def _chunk(response: pb.GenerateResponse) -> Chunk:
    usage = response.usage
    return Chunk(
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=logprobs_from_proto(response.logprobs),
        finish_reason=finish_reason_from_proto(response.finish_reason),
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        if response.HasField("usage")
        else None,
        index=response.index,
        prompt_logprobs=logprobs_from_proto(response.prompt_logprobs),
    )
