"""The limits of the door, in one table: what a client may send, hold open and leave unread.

HTTP and gRPC read the same values, `intarsia serve` and the Serve application take each as a setting of the same name,
and `docs/reliability.md` prints the table. A limit holds before what it limits is parsed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from textwrap import wrap
from typing import Any, NamedTuple

from ...errors import InvalidRequest, InvalidSetting

KIB, MIB = 2**10, 2**20


def _limit(default: float, unit: str, about: str, answer: str) -> Any:
    """A row of the table: the default, its unit, what is limited, and what is answered when it is passed."""
    return field(default=default, metadata={"unit": unit, "about": about, "answer": answer})


@dataclass(frozen=True, slots=True)
class Limits:
    """A row for each limit. Raises `InvalidSetting` for a value that is not above 0."""

    # -- heads: what comes before a body -----------------------------------------------------------------------------
    max_head_bytes: int = _limit(64 * KIB, "bytes", "Of a request's first line and headers together.", "431, closed")
    max_headers: int = _limit(128, "headers", "Of one request.", "431, closed")
    head_timeout_s: float = _limit(10.0, "s", "From a head's first byte to its last; of TLS and HTTP/2, too.", "closed")

    # -- bodies ------------------------------------------------------------------------------------------------------
    max_body_bytes: int = _limit(32 * MIB, "bytes", "Of one HTTP body.", "413, closed")
    max_message_bytes: int = _limit(16 * MIB, "bytes", "Of one gRPC message.", "RESOURCE_EXHAUSTED")
    min_body_bytes_per_s: int = _limit(
        16 * KIB, "bytes/s", "Lowest rate of a body, looked at every ten seconds.", "408, closed"
    )
    max_key_bodies_bytes: int = _limit(
        64 * MIB, "bytes", "Of one key's bodies that are being read or parsed; of all without a key.", "429"
    )
    max_bodies_bytes: int = _limit(256 * MIB, "bytes", "The same of all keys together.", "429")

    # -- what is in a body, before it becomes a request --------------------------------------------------------------
    max_nesting: int = _limit(64, "levels", "Of lists and objects within each other.", "400")
    max_json_items: int = _limit(
        2**18, "items", "Values in one body; as many as max_model_len, where that is more.", "400"
    )
    max_prompts: int = _limit(2048, "prompts", "Of one completion request.", "400")
    max_messages: int = _limit(4096, "messages", "Of one conversation, or parts of one message.", "400")
    max_tools: int = _limit(128, "tools", "Of one request.", "400")
    max_stop_token_ids: int = _limit(1024, "tokens", "In stop_token_ids.", "400, INVALID_ARGUMENT")
    max_batch_requests: int = _limit(2048, "requests", "Of one GenerateBatch.", "INVALID_ARGUMENT")
    max_images: int = _limit(64, "images", "Of one request, whatever the model takes.", "400, INVALID_ARGUMENT")
    max_id_chars: int = _limit(128, "characters", "Of a request id; they are printable.", "400, INVALID_ARGUMENT")
    max_name_chars: int = _limit(256, "characters", "Of other names: models, users, functions, keys.", "400")
    max_counted_text_bytes: int = _limit(
        MIB,
        "bytes",
        "Of a text whose tokens are only asked for; of a prompt: what max_model_len tokens can hold.",
        "400, INVALID_ARGUMENT",
    )
    max_counted_tokens: int = _limit(
        2**18,
        "tokens",
        "To be turned into text; as many as max_model_len, where that is more.",
        "400, INVALID_ARGUMENT",
    )

    # -- templates ---------------------------------------------------------------------------------------------------
    template_timeout_s: float = _limit(2.0, "s", "For a chat template to render a conversation.", "400")
    max_template_memory: int = _limit(512 * MIB, "bytes", "That it may take for that.", "400")

    # -- connections -------------------------------------------------------------------------------------------------
    max_connections: int = _limit(8192, "connections", "Open at once, of each server.", "closed")
    max_keyless_connections: int = _limit(
        1024,
        "connections",
        "The same of those that have not shown a key, where keys are wanted. Over gRPC: watches of health.",
        "closed; RESOURCE_EXHAUSTED",
    )
    max_key_connections: int = _limit(2048, "connections", "The same of one key. HTTP only.", "429, closed")
    # Longer than clients and load balancers keep one (httpx, and OpenAI's client with it, 5 s; AWS's balancer and nginx
    # 60 s): the side that closes first knows it; the other side may be sending a request just then, which is lost.
    idle_timeout_s: float = _limit(
        75.0, "s", "Before a connection without a request is closed. Over gRPC: that a message may take.", "closed"
    )

    # -- clients that do not read ------------------------------------------------------------------------------------
    max_unread_bytes: int = _limit(
        MIB,
        "bytes",
        "Of one request's answers, not taken by its client yet; more ends them after unread_timeout_s.",
        "closed; DEADLINE_EXCEEDED",
    )
    unread_timeout_s: float = _limit(
        30.0, "s", "That a client may take nothing of what waits for it.", "closed; DEADLINE_EXCEEDED"
    )

    # -- watchers of the cache ---------------------------------------------------------------------------------------
    max_watchers: int = _limit(64, "watchers", "Of the cache, of all keys.", "RESOURCE_EXHAUSTED")
    max_key_watchers: int = _limit(8, "watchers", "The same of one key.", "RESOURCE_EXHAUSTED")
    max_unread_names: int = _limit(
        65536, "block names", "That a watcher has not taken.", "RESOURCE_EXHAUSTED: start anew"
    )

    # -- probes of routers --------------------------------------------------------------------------------------------
    max_probes: int = _limit(64, "probes", "Under way at once, of all keys.", "503, RESOURCE_EXHAUSTED")
    max_key_probes: int = _limit(16, "probes", "The same of one key.", "429, RESOURCE_EXHAUSTED")

    # -- responses that are kept or made in the background -----------------------------------------------------------
    max_stored_responses: int = _limit(
        10_000, "kept", "Responses and conversations of one tenant.", "the oldest are forgotten"
    )
    max_stored_bytes: int = _limit(256 * MIB, "bytes", "The same, as they are kept.", "the oldest are forgotten")
    max_stored_age_s: float = _limit(30 * 86400.0, "s", "Since one was made or last added to.", "it is forgotten")
    max_background: int = _limit(64, "responses", "Of one tenant, made in the background at once.", "429")

    def __post_init__(self):
        for row in fields(self):
            if not getattr(self, row.name) > 0:
                raise InvalidSetting(
                    f"{row.name} must be above 0 {row.metadata['unit']}, got {getattr(self, row.name)}", field=row.name
                )


class Row(NamedTuple):
    """One limit, for people."""

    name: str
    default: float
    unit: str
    about: str
    answer: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        return f"{self.default:,}" if isinstance(self.default, int) else f"{self.default:g}"


def rows() -> Iterator[Row]:
    """The table, in its order."""
    usual = Limits()
    for each in fields(Limits):
        said = each.metadata
        yield Row(each.name, getattr(usual, each.name), said["unit"], said["about"], said["answer"])


def markdown() -> Iterator[str]:
    """The table as `docs/reliability.md` has it."""
    yield "| limit (flag) | default | unit | what it limits | answer |"
    yield "|---|---|---|---|---|"
    for row in rows():
        yield f"| `{row.flag}` | {row.default_text} | {row.unit} | {row.about} | {row.answer} |"


def as_text() -> Iterator[str]:
    """The table for people: two lines for each limit, of 80 columns at the most."""
    yield f"{'limit':<26} {'default':>18}  answer"
    for row in rows():
        yield f"{row.flag:<26} {f'{row.default_text} {row.unit}':>18}  {row.answer}"
        yield from (f"    {line}" for line in wrap(row.about, 76))


def check_id(request_id: str, limits: Limits) -> None:
    """Raises `InvalidRequest` for an id that is long, or holds characters that cannot be printed."""
    is_printable = request_id.isascii() and request_id.isprintable() and " " not in request_id
    if len(request_id) > limits.max_id_chars or not is_printable:
        raise InvalidRequest(
            f"request_id must have at most {limits.max_id_chars} printable ASCII characters, no blanks among them "
            f"(max_id_chars); it has {len(request_id)}: {request_id[:40]!a}",
            field="request_id",
            asked=len(request_id),
            limit=limits.max_id_chars,
        )
