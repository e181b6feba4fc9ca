"""Errors in Anthropic's shape."""

from typing import Any

from starlette._utils import get_route_path
from starlette.types import Scope

from ...errors import Detail, IntarsiaError, Overloaded, OverQuota, PoolExhausted
from .called import REQUEST_ID

PLACE = "/v1/messages"
"""What is below it speaks so."""

MODELS = "/v1/models"
"""OpenAI's clients ask there, too; Anthropic's send a header with each request."""

OVERLOADED = 529
"""Anthropic's status for a server that has too much to do. 429 is for a client that asks too much."""

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""The type of an error by its status. Another one is the request's fault below 500, and the server's above."""


def speaks_anthropic(scope: Scope) -> bool:
    """Is this asked by a client of Anthropic's interface?"""
    path = get_route_path(scope)
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path == PLACE or path.startswith(f"{PLACE}/")


def status_of(error: IntarsiaError, usual: int) -> int:
    """The status of an error of ours. usual: as OpenAI's clients are told it."""
    if isinstance(error, Overloaded | PoolExhausted):
        return 429 if isinstance(error, OverQuota) else OVERLOADED
    return usual


def fault_of(scope: Scope, status: int, message: str, code: Detail | None = None) -> dict[str, Any]:
    """The body of an error. code: Anthropic's own, where there is one that clients act on."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code is not None:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error, "request_id": scope[REQUEST_ID].id}
