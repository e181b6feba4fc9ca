"""Who may connect: to which addresses, with which certificates, with which key.

Without settings a server listens on loopback, where everybody may ask. On any other address it wants keys and TLS, or
to be told that it shall do without.
"""

import hashlib
import hmac
import ipaddress
import secrets
import ssl
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InvalidSetting, Unauthenticated
from ...proto.request import MAX_TENANT_CHARS

if TYPE_CHECKING:
    from grpc import ServerCredentials


class Level(Enum):
    """What a call must bring."""

    OPEN = "nothing"  # load balancers have no key, and the console's page holds nothing secret
    KEY = "a key, where the server has any"
    FIGURES = "the same, or the admin key, which sees what is of all tenants"
    ADMIN = "the admin key"


ROUTES: Mapping[str, Level] = {
    "/": Level.OPEN,  # leads to the console
    "/health": Level.OPEN,
    "/console": Level.OPEN,
    "/console/view": Level.ADMIN,
    "/metrics": Level.FIGURES,
    "/openapi.json": Level.KEY,
    "/version": Level.KEY,
    "/v1/models": Level.KEY,
    "/v1/models/{model:path}": Level.KEY,
    "/v1/completions": Level.KEY,
    "/v1/chat/completions": Level.KEY,
    "/v1/responses": Level.KEY,
    "/v1/responses/{response_id}": Level.KEY,
    "/v1/responses/{response_id}/input_items": Level.KEY,
    "/v1/responses/{response_id}/cancel": Level.KEY,
    "/v1/conversations": Level.KEY,
    "/v1/conversations/{conversation_id}": Level.KEY,
    "/v1/conversations/{conversation_id}/items": Level.KEY,
    "/v1/conversations/{conversation_id}/items/{item_id}": Level.KEY,
    "/v1/leases": Level.FIGURES,
    "/v1/leases/{lease_id}": Level.KEY,
    "/v1/messages": Level.KEY,
    "/v1/messages/count_tokens": Level.KEY,
    "/v1/probe": Level.FIGURES,
    "/tokenize": Level.KEY,
    "/detokenize": Level.KEY,
}
"""The level of every path of HTTP. A path that does not exist needs a key."""

RPCS: Mapping[str, Level] = {
    "/intarsia.v1.Inference/Generate": Level.KEY,
    "/intarsia.v1.Inference/GenerateBatch": Level.KEY,
    "/intarsia.v1.Inference/Abort": Level.KEY,
    "/intarsia.v1.Inference/Tokenize": Level.KEY,
    "/intarsia.v1.Inference/Detokenize": Level.KEY,
    "/intarsia.v1.Inference/GetModelInfo": Level.KEY,
    "/intarsia.v1.Inference/GetLoad": Level.FIGURES,
    "/intarsia.v1.Inference/GetCacheState": Level.FIGURES,
    "/intarsia.v1.Inference/Probe": Level.FIGURES,
    "/intarsia.v1.Inference/WatchCacheEvents": Level.FIGURES,
    "/intarsia.v1.Inference/ListLeases": Level.FIGURES,
    "/intarsia.v1.Inference/ReleaseLease": Level.FIGURES,
    "/grpc.health.v1.Health/Check": Level.OPEN,
    "/grpc.health.v1.Health/Watch": Level.OPEN,
    "/grpc.health.v1.Health/List": Level.OPEN,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Level.KEY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Level.KEY,
}
"""The level of every method of gRPC."""

SCHEME = "bearer "

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant whose key came with the call that is being answered; empty: the key has no tenant, or none came."""

VIEWER: ContextVar[str | None] = ContextVar("viewer", default=None)
"""The tenant whose figures the caller may see; None: those of all tenants."""

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""A digest of the key that came with the call; empty: none came. The limits of a key are counted by it."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Files are in PEM. With `ssl_ca_certs`, clients need a certificate too, signed by one of those."""

    api_key: tuple[str, ...] = field(default=(), repr=False)  # any of them
    api_key_file: str | None = None  # more of them, one on each line; after a space, the tenant whose key it is
    admin_key: tuple[str, ...] = field(default=(), repr=False)  # for the console
    admin_key_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    insecure: bool = False  # listen where other machines can connect, without keys or TLS


class Access:
    """Decides for both servers of a process which clients may connect, and with which keys."""

    def __init__(self, settings: AccessSettings | None = None):
        """Raises `InvalidSetting` for files that cannot be read or do not fit together."""
        self.settings = settings = settings or AccessSettings()
        self._keys = _all_keys("api_key", settings.api_key, settings.api_key_file)
        self._admin_keys = _all_keys("admin_key", settings.admin_key, settings.admin_key_file)
        self._check_files()

    def draw_admin_key(self) -> str | None:
        """A key for the console, drawn for this process; None if it was given some."""
        if self._admin_keys:
            return None
        key = secrets.token_urlsafe(18)
        self._admin_keys = {_digest(key): ""}
        return key

    @property
    def wants_key(self) -> bool:
        return bool(self._keys)

    @property
    def has_tenants(self) -> bool:
        """Whether its keys tell one from another, who then see nothing of each other."""
        return any(self._keys.values())

    @property
    def has_tls(self) -> bool:
        return self.settings.ssl_certfile is not None

    def check_host(self, host: str) -> None:
        """Raises `InvalidSetting` for an address that other machines could reach without saying who they are."""
        if _is_loopback(host) or self.settings.insecure or (self.wants_key and self.has_tls):
            return
        missing = " and ".join(
            what
            for what, there in (
                ("keys (--api-key-file)", self.wants_key),
                ("TLS (--ssl-certfile, --ssl-keyfile)", self.has_tls),
            )
            if not there
        )
        raise InvalidSetting(
            f"other machines could reach host {host!r}, and there are no {missing}. Give them, listen on loopback "
            "(127.0.0.1), or say --insecure if the network itself keeps strangers out.",
            field="host",
        )

    def check(self, level: Level, authorization: str | None) -> bytes:
        """authorization: the header of a call. Notes whose it is. Returns what its key is known by, which is not the
        key; nothing where none is wanted. Raises `Unauthenticated`."""
        if level is Level.ADMIN:
            return self._check_admin_key(authorization)
        if level is Level.OPEN or not self._keys:
            return b""
        is_admin = level is Level.FIGURES and bool(_found(authorization, self._admin_keys))
        tenant = "" if is_admin else _check(authorization, self._keys, "api_key")
        digest = _digest(_given(authorization))
        TENANT.set(tenant)
        VIEWER.set(tenant if self.has_tenants and not is_admin else None)
        CALLER.set(digest.hex())
        return digest

    def _check_admin_key(self, authorization: str | None) -> bytes:
        """The console is closed without an admin key."""
        if not self._admin_keys:
            raise Unauthenticated(
                "the console is closed: to open it, start the server with --admin-key-file (in Serve: admin_key_file)",
                field="admin_key",
            )
        _check(authorization, self._admin_keys, "admin_key")
        return _digest(_given(authorization))

    def ssl_options(self) -> Mapping[str, object]:
        """The options that uvicorn takes for TLS."""
        settings = self.settings
        if not self.has_tls:
            return {}
        wanted = ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE
        return {
            "ssl_certfile": settings.ssl_certfile,
            "ssl_keyfile": settings.ssl_keyfile,
            "ssl_ca_certs": settings.ssl_ca_certs,
            "ssl_cert_reqs": wanted,
        }

    def grpc_credentials(self) -> "ServerCredentials | None":
        settings = self.settings
        if settings.ssl_certfile is None or settings.ssl_keyfile is None:
            return None
        pair = Path(settings.ssl_keyfile).read_bytes(), Path(settings.ssl_certfile).read_bytes()
        roots = Path(settings.ssl_ca_certs).read_bytes() if settings.ssl_ca_certs else None
        from grpc import ssl_server_credentials  # which takes long to import, and a refused setting should not

        return ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)

    def _check_files(self) -> None:
        settings = self.settings
        if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
            missing = "ssl_keyfile" if settings.ssl_keyfile is None else "ssl_certfile"
            raise InvalidSetting(f"TLS needs ssl_certfile and ssl_keyfile; {missing} is missing", field=missing)
        if settings.ssl_ca_certs is not None and settings.ssl_certfile is None:
            raise InvalidSetting("ssl_ca_certs is of use with ssl_certfile and ssl_keyfile only", field="ssl_ca_certs")
        if settings.ssl_certfile is None:
            return
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(
                f"{settings.ssl_certfile} and {settings.ssl_keyfile} are no certificate with its key: {error}",
                field="ssl_certfile",
            ) from None
        if settings.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(settings.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise InvalidSetting(
                    f"{settings.ssl_ca_certs} holds no certificates: {error}", field="ssl_ca_certs"
                ) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(authorization: str | None, keys: Mapping[bytes, str], field: str) -> str:
    """The owner of the key."""
    if not (authorization or "").lower().startswith(SCHEME):
        raise Unauthenticated("a key is wanted: send the header 'Authorization: Bearer KEY'", field=field)
    found = _found(authorization, keys)
    if not found:
        raise Unauthenticated("Incorrect API key provided: this key is not known here", field=field)
    return found[0]


def _found(authorization: str | None, keys: Mapping[bytes, str]) -> list[str]:
    """The owner of the key, if it is one of these."""
    digest = _digest(_given(authorization))
    return [tenant for key, tenant in keys.items() if hmac.compare_digest(digest, key)]  # all, to take the same time


def _given(authorization: str | None) -> str:
    """The key itself."""
    given = authorization or ""
    return given[len(SCHEME) :].strip() if given.lower().startswith(SCHEME) else ""


def _all_keys(field: str, given: Sequence[str], file: str | None) -> dict[bytes, str]:
    """The tenant of each key, by its digest."""
    if any(not key for key in given):
        raise InvalidSetting(f"{field} is empty; leave it out to ask for none", field=field)
    in_file = _keys_of(f"{field}_file", file)
    if file is not None and not in_file:
        raise InvalidSetting(f"{field}_file {file} holds no key", field=f"{field}_file")
    return {_digest(key): "" for key in given} | {_digest(key): tenant for key, tenant in in_file.items()}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _keys_of(field: str, file: str | None) -> dict[str, str]:
    """The tenant of each key in a file."""
    if file is None:
        return {}
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{field} {file} cannot be read: {error}", field=field) from None
    parts = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    for number, words in enumerate(parts, 1):
        if len(words) > 2 or len(words[-1]) > MAX_TENANT_CHARS:
            raise InvalidSetting(
                f"{field} {file}: entry {number} has {len(words)} words; it needs a key and, after a space, the "
                f"name of the tenant whose key it is, of at most {MAX_TENANT_CHARS} characters",
                field=field,
            )
    return {words[0]: words[1] if len(words) > 1 else "" for words in parts}
