"""The Python client of a served model.

with Client("127.0.0.1:50051") as client:
    for chunk in client.generate("The inlay of", SamplingParams(max_tokens=32)):
        print(chunk.text, end="", flush=True)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_status import rpc_status

from ..controller.engine import TokenLogprobs
from ..controller.info import EngineInfo
from ..controller.request import USUAL_TERMS, SamplingParams, Terms
from ..errors import EngineUnavailable, IntarsiaError, InvalidRequest, RequestTooLarge
from ..proto import inference_pb2 as pb
from ..proto import inference_pb2_grpc as pb_grpc
from .convert import (
    MAX_MESSAGE_BYTES,
    error_from_status,
    finish_reason_from_proto,
    info_from_proto,
    logprobs_from_proto,
    prompt_to_proto,
    sampling_to_proto,
)

OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0))


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


class Client:
    """A connection to one server. Threads may share it."""

    def __init__(self, address: str = "127.0.0.1:50051", *, timeout_s: float | None = None):
        """timeout_s: for each call; None waits as long as it takes."""
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
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

        images: files in a usual format, one for each image token of the prompt
        terms: priority, tenant and time limit

        Raises the server's errors as they were: `InvalidRequest`, `EngineUnavailable`, ...
        """
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling=sampling_to_proto(sampling or SamplingParams()),
            images=images,
            priority=terms.priority,
            tenant=terms.tenant,
            timeout_s=terms.timeout_s,
        )
        prompt_to_proto(request, prompt)
        call: Any = self._stub.Generate(request, timeout=self._timeout_s)
        try:
            for response in call:
                yield _chunk(response)
        except grpc.RpcError as error:
            raise self._typed(error) from None
        finally:
            call.cancel()

    def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, *, images: Sequence[bytes] = ()
    ) -> Chunk:
        """The whole answer at once. Of several answers, use `generate`."""
        if sampling is not None and sampling.n > 1:
            raise InvalidRequest(f"complete returns one answer, and n is {sampling.n}; use generate", field="n")
        chunks = list(self.generate(prompt, sampling, images=images))
        return Chunk(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            logprobs=tuple(row for chunk in chunks for row in chunk.logprobs),
            finish_reason=chunks[-1].finish_reason,
            usage=chunks[-1].usage,
            prompt_logprobs=chunks[0].prompt_logprobs,
        )

    def model_info(self) -> EngineInfo:
        """What is being served. `model_dir` is empty: it is the server's business."""
        try:
            return info_from_proto(self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise self._typed(error) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _typed(self, error: Any) -> IntarsiaError:
        """The error as the server raised it, or what its absence means."""
        status = rpc_status.from_call(error)
        ours = error_from_status(status) if status else None
        if ours is not None:
            return ours
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return EngineUnavailable(
                f"no server answers at {self.address}: {error.details()}. Start one with: intarsia serve MODEL_DIR",
                field="address",
            )
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # of gRPC itself: ours would carry details
            return RequestTooLarge(f"{self.address} does not take a message of this size: {error.details()}")
        return IntarsiaError(f"{self.address} answered {error.code().name}: {error.details()}")


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
