"""From what was sent to what the engine is asked."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ... import __version__
from ...errors import InvalidRequest, UnknownModel
from ...proto.request import RequestOptions, SamplingParams
from ...proto.status import EngineInfo
from ..front_end.front_end import FEW_VALUES, FrontEnd
from ..front_end.json_pieces import size_of
from .protocol import (
    ChatRequest,
    ImagePart,
    JsonFormat,
    Message,
    ResponsesRequest,
    Sampling,
    SchemaFormat,
    StructuredOutputs,
    TextPart,
    Tool,
)
from .schemas import Shape, as_given, closed

PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "n", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "include_stop_str_in_output", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
"""Fields that mean to the engine what they mean here."""

NOT_FOR_TEMPLATES = {"content", "tool_calls", "annotations", "cache_control", "reasoning"}
"""Fields of messages that say nothing to a template, or are put into its words."""

FORMS = ("json_schema", "regex", "choice")
"""What the engine calls the forms of answers."""

THEIR_FIELDS = {"images": "messages", "bad_token_ids": "bad_words"}
"""What the engine calls fields that have another name in requests."""

ANY_OBJECT = json.dumps({"type": "object"})


def shape_of(front_end: FrontEnd) -> Shape:
    """How the server's settings want schemas to be shaped."""
    return as_given if front_end.settings.open_objects else closed


def sampling_of(
    body: Sampling,
    info: EngineInfo,
    max_tokens: int,
    logprobs: int | None,
    form: Mapping[str, Any] | None = None,
    bad: tuple[tuple[int, ...], ...] = (),
    shaped: Shape = closed,
) -> SamplingParams:
    """info: of the engine that is asked. form: what the answer must look like, in place of what `body` says of it.
    bad: tokens of `bad_words`. shaped: what becomes of schemas. Raises `InvalidRequest`."""
    given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        given["seed"] = body.seed % 2**63
    if body.stop:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias:
        given["logit_bias"] = {int(token): float(bias) for token, bias in body.logit_bias.items()}
    given |= form_of(body, shaped) if form is None else form
    return info.sampling(max_tokens=max_tokens, logprobs=logprobs, bad_token_ids=bad, **given)


def form_of(body: Sampling, shaped: Shape) -> dict[str, Any]:
    """What `response_format` or `structured_outputs` say about the answer. Raises `InvalidRequest`."""
    found: dict[str, Any] = {}
    match body.response_format:
        case JsonFormat(schema_=schema):
            found["json_schema"] = _schema(schema, shaped)
        case SchemaFormat(json_schema=described):
            found["json_schema"] = _schema(described.schema_, shaped)
    wanted = _structured(body.structured_outputs, shaped) if body.structured_outputs is not None else {}
    if found and wanted:
        raise InvalidRequest(
            "response_format and structured_outputs both say what the answer looks like; give one of them",
            field="structured_outputs",
        )
    return found | wanted


def _schema(schema: dict[str, Any] | None, shaped: Shape) -> str:
    return ANY_OBJECT if schema is None else json.dumps(shaped(schema))


def _read(schema: dict[str, Any] | str) -> Any:
    """vLLM takes schemas as texts, too. Raises `InvalidRequest`."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.json is no JSON: {error}", field="structured_outputs") from None


def _structured(wanted: StructuredOutputs, shaped: Shape) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    given = [name.rstrip("_") for name, value in wanted if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs holds one of json, regex and choice; this holds {' and '.join(given) or 'none'}",
            field="structured_outputs",
        )
    found: dict[str, Any] = {}
    if wanted.json_ is not None:
        found["json_schema"] = _schema(_read(wanted.json_), shaped)
    if wanted.regex is not None:
        found["regex"] = wanted.regex
    if wanted.choice:
        found["choice"] = tuple(wanted.choice)
    return found


async def bad_token_ids(front_end: FrontEnd, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and behind a blank. Raises `InvalidRequest`."""
    if not words:
        return ()
    tokenizer = front_end.tokenizer
    if tokenizer is None:
        raise InvalidRequest(f"{front_end.info.model} has no tokenizer, so no words are known to it", field="bad_words")

    def made() -> tuple[tuple[int, ...], ...]:
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        rows = {tuple(tokenizer.encode(text, add_special_tokens=False)): None for text in texts}
        return tuple(row for row in rows if row)

    return await front_end.aside(len(words) * 20, made)


def truncated(prompt: list[int], body: Sampling, longest: int) -> list[int]:
    """longest: of prompts for which there is room."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        return prompt
    kept = max(1, longest) if kept == -1 else kept
    if len(prompt) <= kept:
        return prompt
    return prompt[:kept] if body.truncation_side == "right" else prompt[len(prompt) - kept :]


def fingerprint_of(info: EngineInfo) -> str:
    """Answers of the same seed may differ where this differs."""
    facts = __version__, info.model, info.architecture, info.dtype, info.device, info.tensor_parallel_size
    return f"fp_{blake2b(repr(facts).encode(), digest_size=5).hexdigest()}"


def options_of(body: Sampling) -> RequestOptions:
    """Raises `InvalidRequest`."""
    return RequestOptions(
        priority=body.priority or 0,
        tenant=body.user or "",
        keep_s=body.keep_s,
        keep_required=bool(body.keep_required),
        lease=body.lease or "",
    )


@contextlib.contextmanager
def in_own_words(body: Sampling) -> Iterator[None]:
    """Make refusals of the engine name the request's own field."""
    try:
        yield
    except InvalidRequest as error:
        if error.field in FORMS:
            error.field = "response_format" if body.response_format is not None else "structured_outputs"
        elif error.field == "logprobs" and isinstance(body, ChatRequest):
            error.field = "top_logprobs"
        elif error.field in THEIR_FIELDS:
            error.field = THEIR_FIELDS[error.field]
        raise


def check_streaming(body: Sampling | ResponsesRequest) -> None:
    """Raises `InvalidRequest` for what is said of a stream that is not asked for."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", field="stream_options"
        )


def check_begin(begins: bool | None, continues: bool | None) -> bool:
    """Is there to be a new turn after the messages? Raises `InvalidRequest`."""
    if begins and continues:
        raise InvalidRequest(
            "continue_final_message goes on with the last message, add_generation_prompt begins another; give one",
            field="continue_final_message",
        )
    return not continues if begins is None else begins


def check_model(asked: str | None, served: str) -> None:
    """Raises `UnknownModel`."""
    if asked is not None and asked != served:
        raise UnknownModel(
            f"The model `{asked[:100]}` does not exist here; `{served}` does. GET /v1/models lists what is served.",
            field="model",
        )


def chat_of(given: Mapping[str, Any]) -> ChatRequest:
    """A request of chat that says what one of another interface says. Nulls say nothing. Raises
    `RequestValidationError` for what breaks a rule that chat has and the other lacks."""
    told = {name: value for name, value in given.items() if value is not None}
    try:
        return ChatRequest.model_validate(told)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults, body=told) from None


async def turns_aside(front_end: FrontEnd, messages: list[Message]) -> tuple[list[dict[str, Any]], list[str]]:
    """`turns_of`; beside the loop where they are many or long."""
    return await front_end.aside(size_of(messages, FEW_VALUES), lambda: turns_of(messages))


def turns_of(messages: list[Message]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as chat templates want them, and the URLs of the images among them, in their order."""
    turns, urls = [], []
    for message in messages:
        turn = message.model_dump(
            exclude_none=True, exclude={"content", "tool_calls", "annotations", "cache_control", "reasoning"}
        )
        # Fields that have two names get the one that templates read.
        if message.reasoning_content is None and message.reasoning is not None:
            turn["reasoning_content"] = message.reasoning
        turn["role"] = "system" if message.role == "developer" else message.role
        # Content in parts: images leave a mark in the turn, and texts alone become one text.
        if isinstance(message.content, list):
            parts = []
            for part in message.content:
                match part:
                    case ImagePart(image_url=image):
                        urls.append(image.url)
                        parts.append({"type": "image"})
                    case TextPart(text=text):
                        parts.append({"type": "text", "text": text})
                    case refusal:
                        parts.append({"type": "text", "text": refusal.refusal})
            is_text = all(part["type"] == "text" for part in parts)
            turn["content"] = "\n".join(part["text"] for part in parts) if is_text else parts
        else:
            turn["content"] = message.content if message.content is not None else ""
        # Calls have their arguments as objects, not as JSON in a text.
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        turns.append(turn)
    return turns, urls


def as_template_has(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    told = (tool for tool in tools if tool.is_in_template)
    return [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in told]


def _arguments(text: str) -> Any:
    """Templates print arguments as JSON, so they want what the JSON says; clients send it as text."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text
