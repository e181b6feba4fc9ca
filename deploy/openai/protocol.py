"""What requests look like. Names, defaults and ranges are OpenAI's; below them come the field's usual extensions.

Values are taken as they are: "1" is no number. A name that is not known is refused rather than overlooked, since a
misspelt `max_token` would otherwise cost its owner an hour.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from ...proto.request import (
    MAX_ANSWERS,
    MAX_BAD,
    MAX_KEEP_S,
    MAX_LEASE_CHARS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
    MAX_STOPS,
)
from .lease_bodies import OfLease

TOKEN_FORMAT = "token"
"""The format of token ids in the OpenAPI document, which says of the served model how many there are."""

Text = Annotated[str, StringConstraints(min_length=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, json_schema_extra={"format": TOKEN_FORMAT})]
KeptSeconds = Annotated[float, Field(gt=0, le=MAX_KEEP_S, allow_inf_nan=False)]

LeaseId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LEASE_CHARS)]

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
FormName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
TokenName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[TokenName, Bias], Field(json_schema_extra={"additionalProperties": False})]
BIGGEST_INT = 2**31 - 1

MAX_BAD_WORDS = MAX_BAD // 2
"""Each may be two rows of tokens."""

MEMBERS = 256
"""Most members of an object whose members have a meaning here: none has a tenth of them."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_whole_numbers(cls, value: Any) -> Any:
        """To JSON, 3.0 is a whole number like 3."""
        if isinstance(value, dict) and len(value) > MEMBERS:
            raise ValueError(f"an object of a request has at most {MEMBERS} members, this one {len(value)}")
        return {name: _whole(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _whole(value: Any) -> Any:
    """Of the values within a list, too; those within an object are its model's business."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and value and not isinstance(value[0], str):
        return [_whole(inner) for inner in value]
    return value


NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's, of what is not done here
    "audio": (),
    "context_management": (),
    "function_call": ("none",),
    "functions": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    # Other servers'
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_content_format": ("auto",),
    "documents": ([],),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Fields of OpenAI and of other servers that are not known here, and the values of theirs (null is always one) that ask
for nothing but what is done here anyway: clients that send every field send these."""


def is_neutral(name: str, value: Any) -> bool:
    """Does it ask for nothing, though the field is not known here?"""
    values = NEUTRAL.get(name)
    return values is not None and (value is None or any(_is_same(value, each) for each in values))


def _is_same(value: Any, other: Any) -> bool:
    """Are two values equal as JSON has it? 1 is 1.0, and not true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class Tolerant(Strict):
    """A request. Fields that ask for nothing are passed over."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if name in cls.model_fields or not is_neutral(name, each)}


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="A last event with the usage, and null in all others.")
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")
    continuous_usage_stats: bool = Field(False, description="The usage so far in every event.")


class JsonSchema(Strict):
    name: FormName | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Of the object; as json_schema has it.")


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """The form an answer must have: one of these."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json", description="A JSON schema.")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True, min_length=1)] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("nothing of the prompt would be left; give -1, or 1 or more")
    return value


KeptTokens = Annotated[
    int, Field(ge=-1, le=BIGGEST_INT, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)
]


class Sampling(Tolerant):
    """What all ways to ask for text share."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    seed: int | None = Field(None, description="Same seed, same answer; of any size.")
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="On whose behalf: requests of different users share the machine fairly.")

    # The field's extensions
    top_k: Annotated[int, Field(ge=-1, le=BIGGEST_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=BIGGEST_INT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = Field(None, description="-1: all.")
    bad_words: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="Texts whose usual tokens do not come in the answer."
    )
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="So many tokens of the prompt are kept; -1: as many as leave room for max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where it is cut; left unless said.")
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    keep_s: KeptSeconds | None = Field(
        None, description="Seconds for which the conversation's cache is kept after the answer, as `usage.lease` tells."
    )
    keep_required: bool | None = Field(None, description="The request is refused where that cannot be.")
    lease: LeaseId | None = Field(None, description="The lease that this turn takes over, if its prompt does not tell.")
    return_token_ids: bool | None = Field(None, description="The ids of prompt and answer too.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Log-probabilities name tokens `token_id:N`.")
    request_id: Name | None = None


def _no_suffix(value: str) -> str:
    if value:
        raise ValueError("not supported: text is only continued here")
    return value


class CompletionRequest(Sampling):
    model: str | None = Field(None, description="The served model; none: it.")
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]], Field(fail_fast=True, min_length=1)
        ]
    )
    max_tokens: Annotated[int, Field(ge=0, le=BIGGEST_INT)] | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = Field(None, description="-1: all.")
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = Field(None, description="n, or nothing.")
    suffix: Annotated[str, AfterValidator(_no_suffix), Field(json_schema_extra={"maxLength": 0})] | None = None


class AnyPart(Strict):
    cache_control: dict[str, Any] | None = Field(None, description="Accepted, without effect.")


class TextPart(AnyPart):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str = Field(description="data:image/...;base64,..., or https://... at a host that the server fetches from.")
    detail: Literal["auto", "low", "high"] | None = Field(None, description="Accepted, without effect.")


class ImagePart(AnyPart):
    type: Literal["image_url"]
    image_url: ImageUrl


class RefusalPart(AnyPart):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    """One turn. What a role may say beside `content` is the template's business."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of `reasoning_content`.")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted, without effect.")
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class Function(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    is_in_template: ClassVar[bool] = True

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = Field(None, description="Accepted, without effect.")


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    model: str | None = Field(None, description="The served model; none: it.")
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=BIGGEST_INT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=BIGGEST_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = Field(None, description="-1: all.")
    echo: bool | None = Field(None, description="Answers begin with the last message, where that is the assistant's.")
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Accepted without effect: they say nothing about the answer's tokens
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    reasoning_effort: Effort | None = Field(None, description="Handed to the chat template.")
    verbosity: Verbosity | None = Field(None, description="Handed to the chat template.")
    modalities: list[Literal["text"]] | None = None


class Tokenizing(Strict):
    model: str | None = None
    return_token_strs: bool | None = None


class TokenizeText(Tokenizing):
    prompt: str
    add_special_tokens: bool | None = Field(None, description="True unless said otherwise.")


class TokenizeChat(Tokenizing):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Beside those that the template writes.")
    chat_template_kwargs: dict[str, Any] | None = None


def _what_to_tokenize(value: Any) -> str:
    messages = value.get("messages") if isinstance(value, dict) else getattr(value, "messages", None)
    return "chat" if messages is not None else "text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeChat, Tag("chat")], Discriminator(_what_to_tokenize)
]


class Probing(Strict):
    """What a request would meet at each engine. The prompt is read as the model's own requests are."""

    model: str | None = None
    cache_salt: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="Whose prompts are looked for: a tenant's name. None: the key's own."
    )


class ProbePrompt(Probing):
    prompt: str | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


class ProbeChat(Probing):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


ProbeRequest = Annotated[
    Annotated[ProbePrompt, Tag("text")] | Annotated[ProbeChat, Tag("chat")], Discriminator(_what_to_tokenize)
]


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


# -- answers ---------------------------------------------------------------------------------------------------------


class NotCached(BaseModel):
    """Tokens of a prompt that were not found in the cache, for one cause. All of them and `cached_tokens` are the
    whole prompt."""

    cause: str
    tokens: int
    layers: str | None = Field(None, description="The kind of layers that lacked them, where it was for one kind.")
    would_help: str | None = None


class PromptDetails(BaseModel):
    cached_tokens: int
    not_cached: list[NotCached] = []


class CompletionDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    lease: OfLease = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # or a `Series` of such, while it is written


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # or a `Series` of such, while it is written


class Capabilities(BaseModel):
    """What may be asked of a model."""

    completions: bool
    chat_completions: bool
    responses: bool
    messages: bool
    tools: bool
    thinking: bool = Field(description="Whether its thoughts are told apart.")
    vision: bool
    structured_outputs: bool
    logprobs: bool
    prefix_caching: bool


class Parsers(BaseModel):
    """How its answers are read, by a format's name. Null: unknown, or it has none."""

    tool_call: str | None
    reasoning: str | None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "intarsia"
    root: str
    parent: str | None = Field(None, description="Of an adapter: the model that it adapts.")
    max_model_len: int
    capabilities: Capabilities
    parsers: Parsers


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class EngineFigures(BaseModel):
    """Load is of all requests; for a tenant's key, of its own."""

    cached_tokens: int = Field(description="Of the prompt, found in its cache.")
    running: int
    waiting: int
    queued_tokens: int = Field(description="Of requests that wait.")
    pool_use: float = Field(description="Share of the block pool that requests hold, from 0 to 1.")
    tokens_per_s: float | None = Field(description="Drawn of late; null: none, or not for this key to know.")
    is_leaving: bool = Field(description="It ends when its requests have; send no others.")


class ProbedEngine(BaseModel):
    engine: str
    figures: EngineFigures | None = Field(description="Null: the engine did not answer in time.")


class Probes(BaseModel):
    object: Literal["probe"] = "probe"
    model: str
    prompt_tokens: int
    engines: list[ProbedEngine]


class PlainText(BaseModel):
    prompt: str


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


# -- responses -------------------------------------------------------------------------------------------------------


class Item(Strict):
    """Clients send back what they were sent, with every field that their version knows."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty_strangers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: inner for name, inner in value.items() if inner is not None or name in cls.model_fields}


class InputText(Item):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Item):
    type: Literal["input_image"]
    image_url: str = Field(description="data:image/...;base64,..., or https://... as in chat.")
    detail: Literal["auto", "low", "high"] | None = None


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText | InputImage], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningText(Item):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Item):
    """What an earlier answer thought."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] = []
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = Field(None, description="Accepted, without effect: no key is here.")
    id: str | None = None
    status: str | None = None


class InputCall(Item):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class InputCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText | InputImage], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None


class ItemReference(Item):
    """An item of a response that is kept."""

    type: Literal["item_reference"]
    id: str


def _kind_of_item(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of_item),
]


def _no_deferring(value: bool) -> bool:
    if value:
        raise ValueError("tools are known to the model from the beginning here")
    return value


class ResponseTool(Strict):
    type: Literal["function"]
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = Field(None, description="Accepted, without effect.")
    defer_loading: Annotated[bool, AfterValidator(_no_deferring), Field(json_schema_extra={"const": False})] | None = (
        None
    )
    output_schema: dict[str, Any] | None = Field(None, description="Accepted, without effect.")


class NamespaceTool(Strict):
    """Functions under a name of their own; the model knows them as `name.function`."""

    type: Literal["namespace"]
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=128)]


class WebSearchTool(BaseModel):
    """Left out: nothing here searches the web. Codex offers it with every request. The answer's `tools` lack it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"]


class ResponseToolName(Strict):
    type: Literal["function"]
    name: str


class FlatSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: FormName | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseText(Strict):
    format: Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = Field(None, description="Handed to the chat template.")


class Reasoning(Strict):
    effort: Effort | None = Field(None, description="Handed to the chat template.")
    summary: str | None = None
    generate_summary: str | None = None


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What OpenAI includes in answers. All but the log-probabilities belongs to items that no answer has here."""


class ConversationName(Strict):
    id: str


class ResponsesRequest(Tolerant):
    model: str | None = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=BIGGEST_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    text: ResponseText | None = None
    tools: (
        Annotated[
            list[Annotated[ResponseTool | NamespaceTool | WebSearchTool, Field(discriminator="type")]],
            Field(fail_fast=True, max_length=128),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = Field(
        None, description='Told where `include` has "message.output_text.logprobs".'
    )
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: of a prompt that is too long, the end that leaves room for the answer."
    )

    # The field's extensions
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    top_k: Annotated[int, Field(ge=-1, le=BIGGEST_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    keep_s: KeptSeconds | None = Field(
        None, description="Seconds for which the conversation's cache is kept after the answer, as `usage.lease` tells."
    )
    keep_required: bool | None = Field(None, description="The request is refused where that cannot be.")
    lease: LeaseId | None = Field(None, description="The lease that this turn takes over, if its prompt does not tell.")
    request_id: Name | None = None

    # What is kept of it
    store: bool | None = Field(None, description="Kept unless it is false, where the server keeps responses at all.")
    previous_response_id: str | None = Field(None, description="The kept response that this one goes on from.")
    conversation: str | ConversationName | None = Field(
        None, description="The kept conversation that this one goes on with, and is added to."
    )
    background: bool | None = Field(None, description="Made whether the client waits or not.")

    # Accepted without effect
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation


class ResponseOutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int
    lease: OfLease = None


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[dict[str, Any]] = []


class OutputThought(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[OutputThought]
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(BaseModel):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseError(BaseModel):
    code: str
    message: str


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseBody(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    conversation: dict[str, str] | None = None
    reasoning: dict[str, Any] = {}
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] = {}


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseItems(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
