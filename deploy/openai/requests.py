"""From what was sent to what the engine is asked."""

import json
from collections.abc import Mapping
from typing import Any

from ...controller.info import EngineInfo
from ...controller.request import SamplingParams, Terms
from ...errors import InvalidRequest, UnknownModel
from ..front_end import FEW_VALUES, FrontEnd
from ..json_pieces import size_of
from .protocol import ImagePart, JsonFormat, Message, Sampling, SchemaFormat, StructuredOutputs, TextPart

PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "n", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "include_stop_str_in_output", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
"""Fields that mean to the engine what they mean here."""

ANY_OBJECT = json.dumps({"type": "object"})


def sampling_of(
    body: Sampling, info: EngineInfo, max_tokens: int, logprobs: int | None, form: Mapping[str, Any] | None = None
) -> SamplingParams:
    """info: of the engine that is asked. form: what the answer must look like, in place of what `body` says of it.
    Raises `InvalidRequest`."""
    given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        given["seed"] = body.seed % 2**63
    if body.stop:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias:
        given["logit_bias"] = {int(token): float(bias) for token, bias in body.logit_bias.items()}
    given |= form_of(body) if form is None else form
    return info.sampling(max_tokens=max_tokens, logprobs=logprobs, **given)


def form_of(body: Sampling) -> dict[str, Any]:
    """What `response_format` or `structured_outputs` say about the answer. Raises `InvalidRequest`."""
    found: dict[str, Any] = {}
    match body.response_format:
        case JsonFormat():
            found["json_schema"] = ANY_OBJECT
        case SchemaFormat(json_schema=described):
            found["json_schema"] = json.dumps(described.schema_) if described.schema_ is not None else ANY_OBJECT
    wanted = _structured(body.structured_outputs) if body.structured_outputs is not None else {}
    if found and wanted:
        raise InvalidRequest(
            "response_format and structured_outputs both say what the answer looks like; give one of them",
            field="structured_outputs",
        )
    return found | wanted


def _structured(wanted: StructuredOutputs) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if wanted.json_ is not None:
        found["json_schema"] = wanted.json_ if isinstance(wanted.json_, str) else json.dumps(wanted.json_)
    if wanted.regex is not None:
        found["regex"] = wanted.regex
    if wanted.choice:
        found["choice"] = tuple(wanted.choice)
    return found


def terms_of(body: Sampling) -> Terms:
    """Raises `InvalidRequest`."""
    return Terms(priority=body.priority or 0, tenant=body.user or "")


def check_model(asked: str | None, served: str) -> None:
    """Raises `UnknownModel`."""
    if asked is not None and asked != served:
        raise UnknownModel(
            f"the model {asked[:100]!r} is not served here; {served!r} is. GET /v1/models lists what is.", field="model"
        )


async def turns_aside(front_end: FrontEnd, messages: list[Message]) -> tuple[list[dict[str, Any]], list[str]]:
    """`turns_of`; beside the loop where they are many or long."""
    return await front_end.aside(size_of(messages, FEW_VALUES), lambda: turns_of(messages))


def turns_of(messages: list[Message]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as chat templates want them, and the URLs of the images among them, in their order."""
    turns, urls = [], []
    for message in messages:
        turn = message.model_dump(exclude_none=True, exclude={"content", "tool_calls", "annotations"})
        turn["role"] = "system" if message.role == "developer" else message.role
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


def _arguments(text: str) -> Any:
    """Templates print arguments as JSON, so they want what the JSON says; clients send it as text."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text
