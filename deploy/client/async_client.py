"""The client for programs with an event loop. The other one is made of this file: unasync.py."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from ...errors import IntarsiaError
from ...kvcache.events import Event
from ...proto import inference_pb2 as pb
from ...proto import inference_pb2_grpc as pb_grpc
from ...proto.leases import Lease
from ...proto.request import USUAL_OPTIONS, RequestOptions, SamplingParams
from ...proto.status import CacheState, EngineInfo, EngineLoad
from ..front_end.probes import Probed
from ..grpc.convert import (
    cache_state_from_proto,
    events_from_proto,
    info_from_proto,
    leases_from_proto,
    load_from_proto,
    probed_from_proto,
    prompt_to_proto,
)
from .connection import Tls, call_options, open_channel
from .failures import typed
from .messages import Asked, Batch, Chunk, batch_request, check_one, chunk_of, request_of


class AsyncClient:
    """A connection to one server, on an event loop."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        model: str | None = None,
    ):
        """timeout_s: for each call; None waits as long as it takes. model: of a server of several, the one to ask."""
        self.address = address
        self._options = call_options(timeout_s, api_key, model)
        self._channel = open_channel(grpc.aio, address, tls)
        self._stub: Any = pb_grpc.InferenceStub(self._channel)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        options: RequestOptions = USUAL_OPTIONS,
    ) -> AsyncGenerator[Chunk, None]:
        """Tokens as they come, of all answers; each chunk says which answer it is of. Closing the generator before its
        end stops the generation.

        sampling: None: 16 tokens, as the checkpoint asks
        images: files in a usual format, one for each image token of the prompt
        options: priority, tenant, time limit, and for how long the conversation's cache is to be kept

        Raises the server's errors as they were: `InvalidRequest`, `EngineUnavailable`, ...
        """
        request = request_of(Asked(prompt, sampling, images, request_id, options))
        call = self._stub.Generate(request, **self._options)
        try:
            async for response in call:
                yield chunk_of(response)
        except grpc.RpcError as error:
            raise typed(error, self.address) from None
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        images: Sequence[bytes] = (),
        options: RequestOptions = USUAL_OPTIONS,
    ) -> Chunk:
        """The whole answer at once. Of several answers, use `generate`."""
        check_one(sampling)
        return Chunk.join([chunk async for chunk in self.generate(prompt, sampling, images=images, options=options)])

    async def complete_batch(self, asked: Sequence[Asked]) -> list[Chunk | IntarsiaError]:
        """The answers to several requests, computed side by side, in their order; what is wrong with one of them stands
        in its place."""
        for one in asked:
            check_one(one.sampling)
        batch = Batch(len(asked))
        call = self._stub.GenerateBatch(batch_request(asked), **self._options)
        try:
            async for response in call:
                batch.add(response)
        except grpc.RpcError as error:
            raise typed(error, self.address) from None
        finally:
            call.cancel()
        return batch.outcomes()

    async def abort(self, request_id: str) -> bool:
        """Stop a request of any client of the server. False if there is none of that name."""
        answer = await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))
        return answer.found

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        answer = await self._call(self._stub.Tokenize, request)
        return list(answer.ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        answer = await self._call(self._stub.Detokenize, pb.TokenIds(ids=token_ids))
        return answer.text

    async def model_info(self) -> EngineInfo:
        """What is being served. `model_dir` is empty: it is the server's business."""
        return info_from_proto(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def load(self) -> EngineLoad:
        """How busy the engine is."""
        return load_from_proto(await self._call(self._stub.GetLoad, pb.GetLoadRequest()))

    async def cache_state(self) -> CacheState:
        """Where the blocks of the pool are."""
        return cache_state_from_proto(await self._call(self._stub.GetCacheState, pb.GetCacheStateRequest()))

    async def leases(self) -> list[Lease]:
        """The conversations whose cache is held: the caller's own."""
        return leases_from_proto(await self._call(self._stub.ListLeases, pb.ListLeasesRequest()))

    async def release_lease(self, lease: str) -> None:
        """End one before its time. Raises `UnknownLease` if the caller holds none of that id."""
        await self._call(self._stub.ReleaseLease, pb.ReleaseLeaseRequest(lease=lease))

    async def probe(self, prompt: str | Sequence[int], cache_salt: str = "") -> list[Probed]:
        """What a request with this prompt would meet at each engine of the server. cache_salt: whose prompts are looked
        for; empty: the key's own."""
        request = pb.ProbeRequest(cache_salt=cache_salt)
        prompt_to_proto(request, prompt)
        return probed_from_proto(await self._call(self._stub.Probe, request))

    async def watch_cache(self) -> AsyncGenerator[list[Event], None]:
        """What becomes known in the prefix cache and what is known no longer, as it happens; what is known already
        comes first, after a `Cleared`. Close the generator to stop.

        Raises `Overloaded` when more has happened than was read.
        """
        call = self._stub.WatchCacheEvents(pb.WatchCacheEventsRequest(), metadata=self._options["metadata"])
        try:
            async for message in call:
                yield events_from_proto(message)
        except grpc.RpcError as error:
            raise typed(error, self.address) from None
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
            raise typed(error, self.address) from None
