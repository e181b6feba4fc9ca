"""What a call that failed means: the error as the server raised it, or why no server answered."""

import socket
import ssl
from typing import Any

import grpc
from grpc_status import rpc_status

from ...errors import (
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    RequestTooLarge,
    Unauthenticated,
)
from ..grpc.convert import error_from_status

BARE_CODES: dict[grpc.StatusCode, type[IntarsiaError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}
"""What is clear without details: Ray Serve's proxy drops them."""


HOW_WITH_KEY = "Give a key that it knows: --api-key KEY or INTARSIA_API_KEY (in Python: api_key=)"
HOW_WITH_TLS = "Say who may have signed its certificate: --ssl-ca-certs FILE (in Python: tls=Tls(ca_certs=FILE))"

TRIAL_S = 1.0
"""Time to find out why a server does not answer."""


def typed(error: Any, address: str) -> IntarsiaError:
    """The error as the server raised it, or what its absence means."""
    status = rpc_status.from_call(error)
    ours = error_from_status(status) if status else None
    if ours is None and error.code() in BARE_CODES:
        ours = BARE_CODES[error.code()](error.details())
    if isinstance(ours, Unauthenticated):
        return Unauthenticated(f"{address}: {ours}. {HOW_WITH_KEY}", field=ours.field, **ours.details)
    if ours is not None:
        return ours
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        lack = _lack_of_tls(error.details() or "", address)
        if lack is not None:
            return EngineUnavailable(f"{address} {lack}", field="tls")
        return EngineUnavailable(
            f"no server answers at {address}: {error.details()}. Start one with: intarsia serve MODEL_DIR",
            field="address",
        )
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # of gRPC itself: ours would carry details
        return RequestTooLarge(f"{address} does not take a message of this size: {error.details()}")
    return IntarsiaError(f"{address} answered {error.code().name}: {error.details()}")


def _lack_of_tls(details: str, address: str) -> str | None:
    """Says what is wrong with TLS on one of both sides, if it is TLS. details: gRPC's words."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"has a certificate that no authority known here has signed. {HOW_WITH_TLS}"
    if "WRONG_VERSION_NUMBER" in details:
        return "speaks no TLS; leave --ssl-ca-certs out (in Python: tls=)"
    if "refused" not in details and "resolution" not in details and _speaks_tls(address):
        return f"speaks TLS, and has ended the connection. {HOW_WITH_TLS}, and your own certificate if it wants one"
    return None


def _speaks_tls(address: str) -> bool:
    """Whether a server listens there and speaks TLS."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=TRIAL_S)
        with plain, context.wrap_socket(plain):
            return True
    except (OSError, ValueError):
        return False
