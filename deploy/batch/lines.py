"""What a line of a batch asks, and what its result is, as OpenAI has them.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

    {"id": "batch_req_...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}

A result is the same bytes whenever and beside whatever it is computed. So ids come from the line, `created` is 0, a
request without a seed draws by its id, and what the cache happened to have of its prompt is not part of it.
"""

import hashlib
import json
import re
from typing import Any, NamedTuple

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")

DRAWN_ID = re.compile(r"(call|msg|rs|fc)_[0-9a-f]{24,32}")
"""Ids within answers that are drawn anew each time."""

NOT_REPRODUCIBLE = ("prompt_tokens_details", "input_tokens_details")

TIMES = ("created", "created_at", "completed_at")


class Line(NamedTuple):
    """A request."""

    custom_id: str
    url: str
    body: dict[str, Any]
    request_id: str  # drawn from what it asks


class Refused(NamedTuple):
    """A line that asks for nothing that could be answered."""

    custom_id: str | None
    request_id: str
    message: str


def read_line(text: str | bytes, number: int) -> Line | Refused:
    """A line of a file; the first one has number 1."""
    raw = text if isinstance(text, bytes) else text.encode()
    request_id = hashlib.sha256(b"%d:" % number + raw).hexdigest()[:24]

    def refuse(message: str, custom_id: str | None = None) -> Refused:
        return Refused(custom_id, request_id, f"line {number}: {message}")

    # The line must be an object, and be found again by its custom_id.
    try:
        asked = json.loads(raw)
    except ValueError as error:
        return refuse(f"this is no JSON: {error}")
    if not isinstance(asked, dict):
        return refuse("a line must be a JSON object with custom_id, method, url and body")
    custom_id = asked.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return refuse("custom_id must be a text, by which the result is found")
    # It must be a request that one can post here.
    if asked.get("method", "POST") != "POST":
        return refuse(f"method must be POST, got {asked['method']!r}", custom_id)
    if asked.get("url") not in URLS:
        return refuse(f"url must be one of {', '.join(URLS)}; got {asked.get('url')!r}", custom_id)
    # Its body must have one answer, not a stream.
    body = asked.get("body")
    if not isinstance(body, dict):
        return refuse("body must be a JSON object: what would be posted", custom_id)
    if body.get("stream"):
        return refuse("stream has no place in a batch; leave it out", custom_id)
    return Line(custom_id, asked["url"], body, request_id)


def result(line: Line, status: int, body: Any) -> str:
    """The result of a line that was answered, as a line of JSON."""
    response = {
        "status_code": status,
        "request_id": line.request_id,
        "body": _reproducible(body, line.request_id) if status == 200 else body,
    }
    return _as_line(line.request_id, line.custom_id, response, None)


def refusal(refused: Refused) -> str:
    """The result of a line that was not."""
    error = {"code": "invalid_line", "message": refused.message}
    return _as_line(refused.request_id, refused.custom_id, None, error)


def _as_line(request_id: str, custom_id: str | None, response: Any, error: Any) -> str:
    shown = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def _reproducible(body: Any, request_id: str) -> Any:
    """An answer without what differs from run to run."""
    ids: dict[str, str] = {}

    def settled(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: 0 if name in TIMES and inner is not None else settled(inner)
                for name, inner in value.items()
                if name not in NOT_REPRODUCIBLE
            }
        if isinstance(value, list):
            return [settled(inner) for inner in value]
        if isinstance(value, str) and (drawn := DRAWN_ID.fullmatch(value)):
            digest = hashlib.sha256(f"{request_id}/{len(ids)}".encode()).hexdigest()
            return ids.setdefault(value, f"{drawn[1]}_{digest[: len(value) - len(drawn[1]) - 1]}")
        return value

    return settled(body)
