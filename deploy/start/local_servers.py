"""Servers of this user on this machine, so that `intarsia top` finds them without being told; why one does not answer.

A server leaves a file that only its user can read: where it listens, and the admin key that was drawn for it. A key
that was given to the server is not written anywhere.
"""

import contextlib
import json
import os
import ssl
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import EngineUnavailable, IntarsiaError, InvalidSetting


class Running(NamedTuple):
    """One server."""

    process_id: int
    url: str
    admin_key: str | None


@contextlib.contextmanager
def announced(url: str, admin_key: str | None) -> Iterator[None]:
    """Others of this user find the server while this lasts. A place where that cannot be is no reason not to serve."""
    path = None
    with contextlib.suppress(OSError, InvalidSetting):
        path = folder() / f"{os.getpid()}.json"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": url, "admin_key": admin_key}, file)
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def running() -> list[Running]:
    """Servers that are there, the latest first. What a dead one left is cleared away."""
    found = []
    for path in sorted(folder().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            process_id, facts = int(path.stem), json.loads(path.read_text())
            os.kill(process_id, 0)
            found.append(Running(process_id, facts["url"], facts["admin_key"]))
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError, KeyError):
            continue
    return found


def not_asked(url: str, error: Exception) -> IntarsiaError:
    """The error to raise when a server could not be asked over HTTP. error: of `urllib`."""
    reason = getattr(error, "reason", error)
    why = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return InvalidSetting(
            f"{url} has a certificate that no authority known here has signed for this name. Name its authority: "
            "--ssl-ca-certs FILE",
            field="ssl_ca_certs",
        )
    if isinstance(reason, ConnectionRefusedError):
        advice = "Start a server (intarsia serve MODEL), or say where one is: --url URL"
    elif isinstance(reason, ConnectionResetError) and url.startswith("http:"):
        advice = f"If it speaks TLS: --url {url.replace('http:', 'https:', 1)}"
    elif isinstance(reason, ssl.SSLError):
        advice = f"If it speaks no TLS: --url {url.replace('https:', 'http:', 1)}"
    else:
        return EngineUnavailable(f"{url} cannot be asked: {why}")
    return EngineUnavailable(f"{url} cannot be asked: {why}. {advice}")


def folder() -> Path:
    """The folder of the files. Raises `InvalidSetting` for a folder that others could have put there."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "intarsia" if runtime else Path(tempfile.gettempdir()) / f"intarsia-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise InvalidSetting(f"{path} must be a folder that only its owner can open", field="XDG_RUNTIME_DIR")
    return path
