"""How a client meets a server: its channel, its key, its certificates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ...errors import InvalidSetting
from ..grpc.convert import MAX_MESSAGE_BYTES, MODEL

OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0))


@dataclass(frozen=True, slots=True)
class Tls:
    """How a client meets a server with TLS. All are files in PEM."""

    ca_certs: str | None = None  # of the authorities that sign servers; None: those that this machine trusts
    certfile: str | None = None  # the client's own certificate and its key, where the server wants one
    keyfile: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises `InvalidSetting` for files that cannot be read."""
        return grpc.ssl_channel_credentials(*map(_read, (self.ca_certs, self.keyfile, self.certfile)))


def open_channel(api: Any, address: str, tls: Tls | None) -> Any:
    """api: `grpc`, or `grpc.aio`"""
    if tls is None:
        return api.insecure_channel(address, options=OPTIONS)
    return api.secure_channel(address, tls.credentials(), options=OPTIONS)


def call_options(timeout_s: float | None, api_key: str | None, model: str | None = None) -> dict[str, Any]:
    said = {"authorization": api_key and f"Bearer {api_key}", MODEL: model}
    metadata = tuple((name, value) for name, value in said.items() if value is not None)
    return {"timeout": timeout_s, "metadata": metadata or None}


def _read(file: str | None) -> bytes | None:
    try:
        return Path(file).read_bytes() if file is not None else None
    except OSError as error:
        raise InvalidSetting(f"{file} cannot be read: {error.strerror}", field="tls") from None
