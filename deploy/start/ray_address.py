"""Is there a Ray cluster at an address, and will it have us? Asked before Ray, which would wait for minutes.

A head (its GCS) is asked over gRPC whether it lives, with the token that Ray would show. Of `auto` and `local` Ray
knows more than we do, and of clusters that speak TLS, which have certificates of their own.
"""

import contextlib
import enum
import os
from pathlib import Path

from ...errors import EngineUnavailable, InvalidSetting

ANSWER_WITHIN_S = 4.0

CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"

NO_GRPC = "http2 header"
"""Stands in the details of gRPC's error where a server of another kind has answered."""


class Standing(enum.Enum):
    """How a cluster answers the process that asks."""

    WELCOME = "answers"
    REFUSED = "refuses this process"
    ABSENT = "does not answer"


def check_address() -> None:
    """Check the cluster that RAY_ADDRESS names, if it names one. Raises `InvalidSetting` for what is no address, and
    `EngineUnavailable` where no cluster is, or one that refuses us."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return
    if _target(address) is None:
        raise InvalidSetting(
            f"RAY_ADDRESS must be HOST:PORT of a Ray cluster's head, as 10.0.0.1:6379, or unset; got {address!r}",
            field="RAY_ADDRESS",
        )
    standing = standing_at(address) if can_be_asked(address) else Standing.WELCOME
    if standing is not Standing.WELCOME:
        says = (
            "no Ray cluster answers there" if standing is Standing.ABSENT else "the cluster there refuses this process"
        )
        raise EngineUnavailable(f"RAY_ADDRESS is {address}, and {says}: {advice_for(standing)}.", field="RAY_ADDRESS")


def can_be_asked(address: str) -> bool:
    return _target(address) is not None and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


def _target(address: str) -> str | None:
    """HOST:PORT of an address; None of other forms."""
    target = address.removeprefix("ray://")
    host, _, port = target.rpartition(":")
    return target if host and port.isdecimal() and int(port) < 1 << 16 and "/" not in host else None


def standing_at(address: str, *, timeout_s: float = ANSWER_WITHIN_S) -> Standing:
    """address: one that can be asked. Asks as Ray would, so with a token only if RAY_AUTH_MODE says so."""
    import grpc

    found = token() if is_token_mode() else None
    shown = (("authorization", f"Bearer {found}"),) if found else ()
    with grpc.insecure_channel(str(_target(address)), options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=timeout_s, metadata=shown)
        except grpc.RpcError as error:
            status: grpc.Call = error  # type: ignore[assignment]
            if status.code() is grpc.StatusCode.UNAUTHENTICATED:
                return Standing.REFUSED
            is_grpc = NO_GRPC not in (status.details() or "")
            if status.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) or not is_grpc:
                return Standing.ABSENT
    return Standing.WELCOME  # whatever else it says: it is there, and Ray will find out


def advice_for(standing: Standing) -> str:
    """What to do where a cluster is absent or refuses."""
    if standing is Standing.ABSENT:
        return "start it there (ray start --head), correct the address, or unset RAY_ADDRESS"
    if not is_token_mode():
        return "it wants a token, and RAY_AUTH_MODE does not say so: export RAY_AUTH_MODE=token"
    where = "the token of ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    if token() is None:
        return f"it wants a token, and there is none here: copy that of its head, as {where}"
    return f"it has another token than this process: copy that of its head, as {where}"


def is_token_mode() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def token() -> str | None:
    """The token that Ray would show, looked for where Ray looks."""
    if given := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return given
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    with contextlib.suppress(OSError, UnicodeDecodeError, RuntimeError):
        path = Path(named) if named else Path.home() / ".ray" / "auth_token"
        return path.read_text().strip() or None
    return None
