"""What a client asks, and what comes back: values on this side, protobuf on the wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import IntarsiaError, InvalidRequest
from ...proto import inference_pb2 as pb
from ...proto.leases import LeaseReceipt
from ...proto.reply import TokenLogprobs
from ...proto.request import USUAL_OPTIONS, RequestOptions, SamplingParams
from ..grpc.convert import (
    error_from_proto,
    finish_reason_from_proto,
    logprobs_from_proto,
    prompt_to_proto,
    receipt_from_proto,
    sampling_to_proto,
)


@dataclass(frozen=True, slots=True)
class NotCached:
    """Tokens of a prompt that were not found in the prefix cache, for one cause."""

    cause: str
    tokens: int
    layers: str | None = None  # the kind of layers that lacked them, where it was for one kind
    would_help: str | None = None  # in words, where something would


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    completion_tokens: int
    not_cached: tuple[NotCached, ...] = ()  # the rest of the prompt, by cause
    lease: LeaseReceipt | None = None  # what became of `keep_s`


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

    @classmethod
    def join(cls, chunks: "Sequence[Chunk]") -> "Chunk":
        """All chunks of one answer, in the order in which they came, as one."""
        return cls(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            logprobs=tuple(row for chunk in chunks for row in chunk.logprobs),
            finish_reason=chunks[-1].finish_reason,
            usage=chunks[-1].usage,
            prompt_logprobs=chunks[0].prompt_logprobs,
        )


class Asked(NamedTuple):
    """One request of a batch."""

    prompt: str | Sequence[int]
    sampling: SamplingParams | None = None  # 16 tokens, as the checkpoint asks
    images: Sequence[bytes] = ()  # files in a usual format, one for each image token of the prompt
    request_id: str = ""
    options: RequestOptions = USUAL_OPTIONS


class Batch:
    """What came for each request of a batch."""

    def __init__(self, size: int):
        self._chunks: list[list[Chunk]] = [[] for _ in range(size)]
        self._errors: dict[int, IntarsiaError] = {}

    def add(self, response: pb.GenerateBatchResponse) -> None:
        if response.HasField("error"):
            self._errors[response.request] = error_from_proto(response.error)
        else:
            self._chunks[response.request].append(chunk_of(response.response))

    def outcomes(self) -> list[Chunk | IntarsiaError]:
        return [self._errors.get(n) or Chunk.join(chunks) for n, chunks in enumerate(self._chunks)]


def request_of(asked: Asked) -> pb.GenerateRequest:
    """Raises `InvalidRequest` for what has no place in a message."""
    request = pb.GenerateRequest(
        request_id=asked.request_id,
        sampling=sampling_to_proto(asked.sampling) if asked.sampling is not None else None,
        images=asked.images,
        priority=asked.options.priority,
        tenant=asked.options.tenant,
        timeout_s=asked.options.timeout_s,
        borders=asked.options.borders,
        keep_s=asked.options.keep_s,
        keep_required=asked.options.keep_required,
        lease=asked.options.lease,
    )
    prompt_to_proto(request, asked.prompt)
    return request


def batch_request(asked: Sequence[Asked]) -> pb.GenerateBatchRequest:
    return pb.GenerateBatchRequest(requests=map(request_of, asked))


def check_one(sampling: SamplingParams | None) -> None:
    if sampling is not None and sampling.n > 1:
        raise InvalidRequest(f"complete returns one answer, and n is {sampling.n}; use generate", field="n")


def _not_cached(usage: pb.Usage) -> tuple[NotCached, ...]:
    return tuple(
        NotCached(miss.cause, miss.tokens, miss.layers or None, miss.would_help or None) for miss in usage.not_cached
    )


def _usage(usage: pb.Usage) -> Usage:
    lease = receipt_from_proto(usage.lease) if usage.HasField("lease") else None
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, _not_cached(usage), lease)


def chunk_of(response: pb.GenerateResponse) -> Chunk:
    usage = response.usage
    return Chunk(
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=logprobs_from_proto(response.logprobs),
        finish_reason=finish_reason_from_proto(response.finish_reason),
        usage=_usage(usage) if response.HasField("usage") else None,
        index=response.index,
        prompt_logprobs=logprobs_from_proto(response.prompt_logprobs),
    )
