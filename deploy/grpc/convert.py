"""Protobuf messages to our values and back. All but the pieces of an answer, which `server.py` writes."""

from collections.abc import Sequence
from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from ...errors import (
    ERRORS,
    ContextTooLong,
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    InvalidSetting,
    ModelError,
    Overloaded,
    PoolExhausted,
    RequestAborted,
    RequestTooLarge,
    Unauthenticated,
    UnknownLease,
    UnknownModel,
)
from ...kvcache.events import Cleared, Event, Removed, Stored
from ...proto import inference_pb2 as pb
from ...proto.leases import Lease, LeasedLayers, LeaseReceipt
from ...proto.reply import Delta, TokenLogprobs
from ...proto.request import MAX_BAD, MAX_BIASES, MAX_FORM_CHARS, MAX_STOPS, RequestOptions, SamplingParams
from ...proto.status import CacheState, EngineInfo, EngineLoad, GroupInfo, GroupState, Probe
from ...proto.step import MAX_BAD_TOKENS
from ..front_end.leases import why_refused
from ..front_end.misses import told
from ..front_end.probes import Probed
from ..settings.limits import Limits, check_id
from .wire import Most

MAX_MESSAGE_BYTES = int(Limits().max_message_bytes)
"""Of one gRPC message that a client takes."""

DOMAIN = "intarsia"
"""Of our errors, in google.rpc.ErrorInfo."""

FINISH_REASONS = {None: pb.FINISH_REASON_UNSPECIFIED, "stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_REASON_OF = {number: name for name, number in FINISH_REASONS.items()}

STATUS_CODES: dict[type[IntarsiaError], StatusCode] = {
    UnknownModel: StatusCode.NOT_FOUND,
    UnknownLease: StatusCode.NOT_FOUND,
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    InvalidSetting: StatusCode.FAILED_PRECONDITION,
    ModelError: StatusCode.FAILED_PRECONDITION,
    RequestAborted: StatusCode.CANCELLED,
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    PoolExhausted: StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    EngineUnavailable: StatusCode.UNAVAILABLE,
}
"""By base class, the first that fits; anything else is INTERNAL."""

MAX_MESSAGE_CHARS = 300
"""An error travels three times in the headers of a response: percent-encoded, as status and as field violation. Headers
beyond 8 KiB are refused, and then the caller learns nothing. Ours are shorter, unless they quote what was sent."""

MAX_DETAIL_CHARS = 80

MODEL = "intarsia-model"
"""The entry of a call's metadata that names its model, where several are served."""

LONGEST_DEADLINE_S = 10 * 365 * 24 * 3600.0
"""A call without a deadline has one in the far future."""

_OPTIONAL = (
    "temperature", "top_k", "top_p", "seed", "max_tokens", "ignore_eos", "logprobs", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "include_stop_str_in_output", "n", "prompt_logprobs",
    "json_schema", "regex", "lark",
)  # fmt: skip


class MostOfPrompt(Most):
    """Of the tokens of a prompt."""

    def refusal(self, count: int) -> RequestTooLarge:
        what = f"it has {count} or more {self.what}"
        return ContextTooLong.of(what, self.limit + 1, field=self.field, asked=count, limit=self.limit)


MOST_BAD = Most(MAX_BAD, "rows in bad_token_ids", "bad_token_ids")
MOST_OF_ROW = Most(MAX_BAD_TOKENS, "tokens in a row of bad_token_ids", "bad_token_ids")


def most_prompt_tokens(info: EngineInfo) -> Most:
    return MostOfPrompt(info.max_model_len - 1, "tokens", "prompt")


def most_stop_tokens(limits: Limits) -> Most:
    return Most(limits.max_stop_token_ids, "tokens in stop_token_ids", "stop_token_ids")


def most_batch_requests(limits: Limits) -> Most:
    return Most(limits.max_batch_requests, "requests in the batch", "requests")


def most_counted_tokens(limits: Limits, info: EngineInfo) -> Most:
    return Most(max(limits.max_counted_tokens, info.max_model_len), "tokens to be turned into text", "tokens")


def check_lists(request: pb.GenerateRequest, limits: Limits, info: EngineInfo) -> None:
    """Before anything is made of them. Raises `RequestTooLarge`, naming the field."""
    sampling = request.sampling
    if request.request_id:
        check_id(request.request_id, limits)
    most_prompt_tokens(info).check(len(request.token_ids.ids))
    most_stop_tokens(limits).check(len(sampling.stop_token_ids))
    Most(limits.max_images, "images", "images").check(len(request.images))
    Most(MAX_BIASES, "tokens in logit_bias", "logit_bias").check(len(sampling.logit_bias))
    Most(MAX_STOPS, "texts in stop", "stop").check(len(sampling.stop))
    Most(MAX_FORM_CHARS, "texts in choice", "choice").check(len(sampling.choice))
    MOST_BAD.check(len(sampling.bad_token_ids))
    for row in sampling.bad_token_ids:
        MOST_OF_ROW.check(len(row.ids))


def sampling_from_proto(message: pb.SamplingParams, info: EngineInfo) -> SamplingParams:
    """info: of the engine that is asked. Raises `InvalidRequest`, naming the field."""
    return info.sampling(
        **_set_fields(message),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        choice=tuple(message.choice),
        bad_token_ids=tuple(tuple(row.ids) for row in message.bad_token_ids),
    )


def _set_fields(message: pb.SamplingParams) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    given: dict[str, Any] = {name: value for name in _OPTIONAL if (value := getattr(params, name)) is not None}
    return pb.SamplingParams(
        **given,
        stop_token_ids=params.stop_token_ids,
        logit_bias=dict(params.biases),
        stop=params.stops,
        choice=params.choice,
        bad_token_ids=[pb.TokenRow(ids=row) for row in params.bad_token_ids],
    )


def options_from_proto(request: pb.GenerateRequest, time_remaining_s: float | None) -> RequestOptions:
    """time_remaining_s: of the call. Raises `InvalidRequest`, naming the field."""
    limits = [request.timeout_s] if request.HasField("timeout_s") else []
    if time_remaining_s is not None and time_remaining_s < LONGEST_DEADLINE_S:
        limits.append(max(time_remaining_s, 0.001))
    return RequestOptions(
        priority=request.priority,
        tenant=request.tenant,
        timeout_s=min(limits, default=None),
        borders=tuple(request.borders),
        keep_s=request.keep_s if request.HasField("keep_s") else None,
        keep_required=request.keep_required,
        lease=request.lease,
    )


def prompt_to_proto(request: pb.GenerateRequest | pb.ProbeRequest, prompt: str | Sequence[int]) -> None:
    """Put a text or token ids into `request`. Raises `InvalidRequest` for what has no place in a message."""
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"prompt must be text or token ids from 0 to {2**32 - 1}: {error}", field="prompt"
        ) from error


def finish_reason_from_proto(number: pb.FinishReason) -> str | None:
    return _REASON_OF[number]


def logprobs_from_proto(rows: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(row.token_id, row.logprob, tuple((other.token_id, other.logprob) for other in row.top), row.rank)
        for row in rows
    )


def info_to_proto(info: EngineInfo) -> pb.ModelInfo:
    fields: dict[str, Any] = info._asdict()
    del fields["model_dir"]  # clients are not told where files lie on the server
    fields["groups"] = [pb.LayerGroup(**group._asdict()) for group in info.groups]
    fields["sampling_defaults"] = pb.SamplingParams(**dict[str, Any](info.sampling_defaults))
    return pb.ModelInfo(**fields)


def info_from_proto(message: pb.ModelInfo) -> EngineInfo:
    groups = tuple(
        GroupInfo(group.kind, tuple(group.layers), group.block_tokens, group.page_bytes) for group in message.groups
    )
    fields: dict[str, Any] = {name: getattr(message, name) for name in EngineInfo._fields if name != "model_dir"}
    fields |= {name: None for name in ("image_token_id", "pool_request_len") if not message.HasField(name)}
    fields |= {"model_dir": "", "groups": groups}
    fields |= {"eos_token_ids": tuple(message.eos_token_ids), "notes": tuple(message.notes)}
    fields |= {"sampling_defaults": tuple(_set_fields(message.sampling_defaults).items())}
    return EngineInfo(**fields)


def load_to_proto(load: EngineLoad) -> pb.Load:
    fields: dict[str, Any] = load._asdict()
    return pb.Load(**fields, pool_use=load.pool_use)


def load_from_proto(message: pb.Load) -> EngineLoad:
    return EngineLoad(*(getattr(message, name) for name in EngineLoad._fields))


def probed_to_proto(prompt_tokens: int, probed: Sequence[Probed]) -> pb.ProbeResponse:
    engines = []
    for name, probe in probed:
        figures: dict[str, Any] = {} if probe is None else probe._asdict() | {"answered": True}
        leaving = figures.pop("is_leaving", False)
        engines.append(pb.EngineProbe(engine=name, leaving=leaving, **figures))
    return pb.ProbeResponse(prompt_tokens=prompt_tokens, engines=engines)


def probed_from_proto(message: pb.ProbeResponse) -> list[Probed]:
    def one(engine: pb.EngineProbe) -> Probed:
        same = {name: getattr(engine, name) for name in Probe._fields if name not in ("is_leaving", "tokens_per_s")}
        per_s = engine.tokens_per_s if engine.HasField("tokens_per_s") else None
        made = Probe(**same, is_leaving=engine.leaving, tokens_per_s=per_s) if engine.answered else None
        return Probed(engine.engine, made)

    return list(map(one, message.engines))


def cache_state_to_proto(state: CacheState) -> pb.CacheState:
    fields: dict[str, Any] = state._asdict()
    fields["groups"] = [pb.GroupState(**group._asdict()) for group in state.groups]
    return pb.CacheState(**fields)


def cache_state_from_proto(message: pb.CacheState) -> CacheState:
    groups = tuple(GroupState(*(getattr(group, name) for name in GroupState._fields)) for group in message.groups)
    return CacheState(message.held_pages, message.kept_pages, message.blank_pages, message.requests, groups)


def events_to_proto(events: Sequence[Event]) -> pb.CacheEvents:
    def one(event: Event) -> pb.CacheEvent:
        match event:
            case Stored():
                return pb.CacheEvent(stored=pb.Blocks(**event._asdict()))
            case Removed():
                return pb.CacheEvent(removed=pb.Blocks(**event._asdict()))
            case Cleared():
                return pb.CacheEvent(cleared=True)

    return pb.CacheEvents(events=map(one, events))


def events_from_proto(message: pb.CacheEvents) -> list[Event]:
    def one(event: pb.CacheEvent) -> Event:
        if event.HasField("stored"):
            blocks = event.stored
            return Stored(blocks.group, blocks.kind, blocks.block_tokens, tuple(blocks.hashes))
        if event.HasField("removed"):
            return Removed(event.removed.group, event.removed.kind, tuple(event.removed.hashes))
        return Cleared()

    return list(map(one, message.events))


def error_to_status(error: IntarsiaError) -> status_pb2.Status:
    """An error as google.rpc.Status, with its class and numbers for programs."""
    code = next((code for cls, code in STATUS_CODES.items() if isinstance(error, cls)), StatusCode.INTERNAL)
    message = _shorten(error.message, MAX_MESSAGE_CHARS)
    metadata = {name: _shorten(str(value), MAX_DETAIL_CHARS) for name, value in error.details.items()}
    if error.field:
        metadata["field"] = error.field
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=metadata)
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=round(error.retry_after_s * 1e9) % 10**9, seconds=int(error.retry_after_s))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code.value[0], message=message, details=packed)


def error_to_proto(error: IntarsiaError) -> pb.RequestError:
    """The same within a message, for one request of several."""
    status = error_to_status(error)
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    return pb.RequestError(code=status.code, reason=info.reason, message=error.message, metadata=dict(info.metadata))


def error_from_proto(error: pb.RequestError) -> IntarsiaError:
    metadata = dict(error.metadata)
    field = metadata.pop("field", None)
    return ERRORS.get(error.reason, IntarsiaError)(error.message, field=field, **metadata)


def error_from_status(status: status_pb2.Status) -> IntarsiaError | None:
    """Our error, if the status carries one. Its numbers come back as text."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            metadata = dict(info.metadata)
            field = metadata.pop("field", None)
            return ERRORS.get(info.reason, IntarsiaError)(status.message, field=field, **metadata)
    return None


def _shorten(text: str, limit_chars: int) -> str:
    return text if len(text) <= limit_chars else text[: limit_chars - 4] + " ..."


def receipt_to_proto(receipt: LeaseReceipt) -> pb.Lease:
    fields: dict[str, Any] = receipt._asdict()
    fields["layers"] = [pb.LeasedLayers(**layers._asdict()) for layers in receipt.layers]
    return pb.Lease(**fields, message=why_refused(receipt) if receipt.refused else "")


def leases_to_proto(leases: Sequence[Lease]) -> pb.Leases:
    def one(lease: Lease) -> pb.Lease:
        message = receipt_to_proto(lease.receipt)
        message.tenant, message.is_awaited = lease.tenant, lease.is_awaited
        return message

    return pb.Leases(leases=map(one, leases))


def receipt_from_proto(message: pb.Lease) -> LeaseReceipt:
    given: dict[str, Any] = {name: getattr(message, name) for name in LeaseReceipt._fields}
    given["layers"] = tuple(LeasedLayers(each.kind, each.blocks, each.bytes) for each in message.layers)
    return LeaseReceipt(**given)


def leases_from_proto(message: pb.Leases) -> list[Lease]:
    return [Lease(receipt_from_proto(each), each.tenant, each.is_awaited) for each in message.leases]


def usage_to_proto(last: Delta, prompt_tokens: int, completion_tokens: int) -> pb.Usage:
    return pb.Usage(
        lease=receipt_to_proto(last.lease) if last.lease is not None else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=last.num_cached_tokens,
        completion_tokens=completion_tokens,
        not_cached=[pb.NotCached(**miss) for miss in told(last.misses)],
    )


def logprobs_to_proto(row: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprobs.Alternative(token_id=token, logprob=logprob) for token, logprob in row.top]
    return pb.TokenLogprobs(token_id=row.token_id, logprob=row.logprob, top=top, rank=row.rank)
