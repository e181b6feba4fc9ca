"""What is asked before a Ray is started or joined: whether strangers may run code there, and whether it has room.
Imports nothing heavy, since it is asked first of all.
"""

import os
import resource

from ...errors import InvalidSetting
from ...workers.process.fork_server import start_ahead
from .ray_address import check_address

INSECURE = "INTARSIA_INSECURE_RAY"
"""Environment variable; 1: a Ray that asks for no token will do."""


OBJECT_STORE_BYTES = 256 << 20
"""Engines put nothing there. Ray's own choice, a third of the memory, is address space of each of its processes."""

MIN_ADDRESS_SPACE_BYTES = 3_000_000_000
"""The least address space of each process. With 2 GB a process of Ray's ends without a word, or one waits for it for
ever; with 3 GB a small model is served."""


def check_start(*, is_insecure_fine: bool) -> None:
    """Raises `InvalidSetting` where no Ray of this process should be started, or could be, and `EngineUnavailable`
    where one is to be joined that does not answer, or refuses."""
    _require_address_space()
    _require_token(is_insecure_fine=is_insecure_fine)
    check_address()


def begin_ahead() -> None:
    """Have what takes longest begin before Ray, and beside it: what workers import. Not where a Ray is to be joined,
    whose workers may be on other machines. For when nothing is left to be refused."""
    if not os.environ.get("RAY_ADDRESS"):
        start_ahead()


def _require_address_space() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= MIN_ADDRESS_SPACE_BYTES:
        return
    raise InvalidSetting(
        f"each process may have {limit / 1e9:.1f} GB of address space here (ulimit -v), and those of an engine want "
        f"{MIN_ADDRESS_SPACE_BYTES / 1e9:g} GB at least, and the size of the model beside it. Lift the limit: ulimit "
        "-v unlimited.",
        field="ulimit -v",
        asked=limit,
        limit=MIN_ADDRESS_SPACE_BYTES,
    )


def _require_token(*, is_insecure_fine: bool) -> None:
    """Refuse to start a Ray that asks for no token. One that is joined is looked at when it is there."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if os.environ.get("RAY_ADDRESS") or mode.lower() == "token" or _is_fine(is_insecure_fine):
        return
    raise InvalidSetting(
        f"RAY_AUTH_MODE={mode} starts a Ray that asks for no token, so anybody who reaches its ports runs code here. "
        f"Unset it, or set {INSECURE}=1 (--insecure-ray) if no one else can reach this machine's ports.",
        field="RAY_AUTH_MODE",
    )


def check_cluster(machines: int, *, asks_for_token: bool, is_insecure_fine: bool = False) -> None:
    """Refuse a cluster that asks for no token. Raises `InvalidSetting`."""
    if asks_for_token or _is_fine(is_insecure_fine):
        return
    raise InvalidSetting(
        f"the Ray cluster ({machines} machine{'s' * (machines > 1)}) asks for no token, so anybody who reaches its "
        "ports runs code on it. Start its nodes with RAY_AUTH_MODE=token and a token of your own (ray get-auth-token "
        f"--generate), or set {INSECURE}=1 (--insecure-ray) if the network itself keeps strangers out.",
        field="RAY_AUTH_MODE",
    )


def _is_fine(is_insecure_fine: bool) -> bool:
    return is_insecure_fine or os.environ.get(INSECURE) == "1"
