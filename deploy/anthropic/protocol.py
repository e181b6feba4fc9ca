"""What requests and answers of `/v1/messages` look like. Names, defaults and ranges are Anthropic's; below them come
the extensions that `/v1/responses` has, too.

As everywhere, a name that is not known is refused. What runs at Anthropic's own place (its tools, files, documents that
it reads, containers) has no kind here, so that a request for it is told which kinds there are.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from ...proto.request import MAX_PRIORITY, MAX_STOPS, MAX_TENANT_CHARS
from ..openai.lease_bodies import OfLease
from ..openai.protocol import BIGGEST_INT, Item, KeptSeconds, LeaseId, Name, NotCached, Stop, Tolerant

HINT = (
    "What a prompt has in common with earlier ones is kept in any case. Where the server has leases, this asks that "
    "the conversation's cache be kept for `ttl` after the answer (5m unless said), if there is room."
)


class CacheControl(Item):
    """Where a prefix ends that will come again."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Item):
    """A part of a message."""

    cache_control: CacheControl | None = Field(None, description=HINT)


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, description="Of an earlier answer; accepted, without effect.")


class Base64Source(Item):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Item):
    type: Literal["url"]
    url: str = Field(description="https://... at a host that the server fetches from.")


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class DirectCaller(Item):
    type: Literal["direct"]


class ToolUseBlock(Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None


class ToolReferenceBlock(Block):
    """A tool that a search found; the model reads its definition here."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = Annotated[TextBlock | ImageBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(Block):
    """What a call brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] = ""
    is_error: bool | None = Field(None, description="True: the model reads it behind `Error: `.")


class ThinkingBlock(Item):
    """What an earlier answer thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Accepted, without effect.")


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]
Texts = Annotated[list[TextBlock], Field(fail_fast=True)]


class UserMessage(Item):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(fail_fast=True)]


class AssistantMessage(Item):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]


class MessageTool(Item):
    """A function of the client's."""

    type: Literal["custom"] | None = None
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=128)] | None = Field(
        None, description="The model reads them as the `examples` of the schema."
    )
    strict: bool | None = None
    cache_control: CacheControl | None = Field(None, description=HINT)
    eager_input_streaming: bool | None = Field(None, description="Arguments stream as they are made in any case.")
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: bool | None = Field(None, description="True: the model hears of it where a message refers to it.")


class ToolByName(Item):
    type: Literal["tool_reference"]
    name: str


class ToolDefinition(Item):
    type: Literal["tool_definition"]
    definition: MessageTool


class ToolAdditionBlock(Block):
    type: Literal["tool_addition"]
    tool: Annotated[ToolByName | ToolDefinition, Field(discriminator="type")]


class ToolRemovalBlock(Block):
    type: Literal["tool_removal"]
    tool: ToolByName


SystemBlock = Annotated[TextBlock | ToolAdditionBlock | ToolRemovalBlock, Field(discriminator="type")]


class SystemMessage(Item):
    role: Literal["system"]
    content: str | Annotated[list[SystemBlock], Field(fail_fast=True)]


MessageTurn = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class AutoChoice(Item):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Item):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolNameChoice(Item):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Item):
    type: Literal["none"]


MessageToolChoice = Annotated[AutoChoice | AnyChoice | ToolNameChoice | NoChoice, Field(discriminator="type")]

Display = Literal["summarized", "omitted"]


class ThinkingOn(Item):
    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=BIGGEST_INT)] | None = Field(
        None, description="A hint without effect: thoughts end with the model, or with max_tokens."
    )
    display: Display | None = Field(None, description="omitted: thoughts come as empty blocks.")


class ThinkingAdaptive(Item):
    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingOff(Item):
    type: Literal["disabled"]


Thinking = Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")]


class OutputSchema(Item):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Item):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Handed to the chat template."
    )
    format: OutputSchema | None = None


class Metadata(Item):
    user_id: Annotated[str, StringConstraints(max_length=MAX_TENANT_CHARS)] | None = Field(
        None, description="On whose behalf: requests of different users share the machine fairly."
    )


class KeptThinking(Item):
    """Nothing is cleared."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Item):
    edits: Annotated[list[KeptThinking], Field(fail_fast=True, max_length=16)] | None = None


class Asking(Tolerant):
    """What the two ways to ask share: all that the prompt is made of."""

    model: str | None = Field(None, description="The served model; none: it.")
    messages: Annotated[list[MessageTurn], Field(fail_fast=True, min_length=1)] = Field(
        description="Where the last is the assistant's, the answer goes on with it."
    )
    system: str | Texts | None = None
    tools: Annotated[list[MessageTool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Unset: as the model's chat template has it.")
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description=HINT)
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Literal["standard"] | None = None


class CountRequest(Asking):
    """How many tokens would a request have?"""


class MessagesRequest(Asking):
    max_tokens: Annotated[int, Field(ge=1, le=BIGGEST_INT)]
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=BIGGEST_INT)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Accepted, without effect.")
    thread: dict[str, Any] | None = Field(None, description="Refused: no conversation is kept here.")
    container: None = None
    inference_geo: None = None

    # The field's extensions
    seed: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    keep_s: KeptSeconds | None = Field(
        None, description="Seconds for which the conversation's cache is kept after the answer, as `usage.lease` tells."
    )
    keep_required: bool | None = Field(None, description="The request is refused where that cannot be.")
    lease: LeaseId | None = Field(None, description="The lease that this turn takes over, if its prompt does not tell.")
    request_id: Name | None = None


# -- answers ---------------------------------------------------------------------------------------------------------


class Said(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class Thought(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class Called(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """The prompt's tokens are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    not_cached: list[NotCached] = []  # why the rest was not found, which Anthropic does not tell
    lease: OfLease = None  # what became of `cache_control` or `keep_s`


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageBody(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Said | Thought | Called]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessageUsage


class InputTokens(BaseModel):
    input_tokens: int


class Fault(BaseModel):
    type: str
    message: str


class FaultBody(BaseModel):
    type: Literal["error"] = "error"
    error: Fault
    request_id: str
