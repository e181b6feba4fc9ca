"""Where a server listens, and the error when it cannot."""

import socket
from collections.abc import Mapping

from ...errors import InvalidSetting

BACKLOG = 2048


def listening(host: str, port: int, field: str = "port", backlog: int = BACKLOG) -> socket.socket:
    """A socket that takes connections; port 0 takes a free one. field: the setting that names the port. Raises
    `InvalidSetting` if that fails."""
    opened = None
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(backlog)
    except OSError as error:
        if opened is not None:
            opened.close()
        raise refusal(host, port, field, error) from error
    return opened


def refusal(host: str, port: int, field: str, error: Exception) -> InvalidSetting:
    why = getattr(error, "strerror", None) or "the port is in use or not allowed"
    if isinstance(error, socket.gaierror):
        return InvalidSetting(f"host {host!r} is no address of this machine: {why}", field="host")
    flag = f"--{field.replace('_', '-')}"
    return InvalidSetting(
        f"cannot listen on {host}:{port}: {why}. Choose another port ({flag}), or 0 for a free one.",
        field=field,
        asked=port,
    )


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raises `InvalidSetting` if a server cannot listen at a port, or a port is given twice. ports: by setting."""
    wanted = [port for port in ports.values() if port]
    if len(set(wanted)) < len(wanted):
        raise InvalidSetting(
            f"{' and '.join(ports)} are both {wanted[0]}, and each server needs a port of its own. Choose another, or "
            "0 for a free one.",
            field=next(iter(ports)),
            asked=wanted[0],
        )
    for field, port in ports.items():
        listening(host, port, field).close()
