"""Whether strangers may run code on the Ray that an engine runs in. Imports nothing heavy: it is asked first of all."""

import os

from ..errors import InvalidSetting

INSECURE = "INTARSIA_INSECURE_RAY"
"""Environment variable; 1: a Ray that asks nobody for a token will do."""


def require_token(*, is_insecure_fine: bool) -> None:
    """Refuse to start a Ray that asks nobody for a token. One that is joined is looked at when it is there.

    Raises `InvalidSetting`."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if os.environ.get("RAY_ADDRESS") or mode.lower() == "token" or _is_fine(is_insecure_fine):
        return
    raise InvalidSetting(
        f"RAY_AUTH_MODE={mode} starts a Ray that asks for no token, so that whoever reaches its ports runs code here. "
        f"Unset it, or set {INSECURE}=1 (--insecure-ray) if nobody else can reach this machine's ports.",
        field="RAY_AUTH_MODE",
    )


def check_cluster(machines: int, *, asks_for_token: bool, is_insecure_fine: bool = False) -> None:
    """Refuse a cluster that asks nobody for a token. Raises `InvalidSetting`."""
    if asks_for_token or _is_fine(is_insecure_fine):
        return
    raise InvalidSetting(
        f"the Ray cluster ({machines} machine{'s' * (machines > 1)}) asks for no token, so that whoever reaches its "
        "ports runs code on it. Start its nodes with RAY_AUTH_MODE=token and a token of your own (ray get-auth-token "
        f"--generate), or set {INSECURE}=1 (--insecure-ray) if the network itself keeps strangers out.",
        field="RAY_AUTH_MODE",
    )


def _is_fine(is_insecure_fine: bool) -> bool:
    return is_insecure_fine or os.environ.get(INSECURE) == "1"
