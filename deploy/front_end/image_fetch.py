"""Images by address: fetched by https alone, from hosts that the operator names, and no further than their bounds.

    https://images.example/oak.png     a host of the list     its bytes
                                       any other              a refusal that names the list

A server that fetches what clients name reaches what they cannot: so no host is fetched from unless it is listed, and a
redirect is followed only to one that is.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import TypeGuard
from urllib.parse import urljoin, urlsplit

import httpx

from ...errors import InvalidRequest, InvalidSetting
from ...workers.checkpoint.json_file import clipped
from .images import MAX_IMAGE_BYTES

FETCH_S = 10.0
"""Time to fetch one image, redirects included."""

MAX_REDIRECTS = 3

AT_ONCE = 16
"""Images on their way to one front end."""

MAX_ADDRESS_CHARS = 2048

HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")


class ImageFetcher:
    """hosts: "images.example", "*.example" for all below it, or either with a port; without one it is https's own."""

    def __init__(self, hosts: Sequence[str]):
        self._hosts = tuple(host.lower() for host in hosts)
        self._turns = asyncio.Semaphore(AT_ONCE)

    def check(self, url: str) -> None:
        """Raises `InvalidRequest` for an address from which nothing is fetched."""
        if len(url) > MAX_ADDRESS_CHARS:
            raise InvalidRequest(
                f"an image's address has {len(url)} characters, at most {MAX_ADDRESS_CHARS} are taken", field="images"
            )
        try:
            parts = urlsplit(url)
            host, port, has_user = parts.hostname or "", parts.port or 443, parts.username is not None
        except ValueError:
            raise InvalidRequest(f"{clipped(url, 200)!r} is no address", field="images") from None
        allowed = any(_fits(host.lower(), port, each) for each in self._hosts)
        if parts.scheme.lower() != "https" or has_user or not allowed:
            raise InvalidRequest(
                f"images are fetched by https from {', '.join(self._hosts)}, and not from "
                f"{clipped(f'{parts.scheme}://{parts.netloc}', 200)}; send a data URL (data:image/png;base64,...)",
                field="images",
            )

    async def fetch(self, url: str) -> bytes:
        """Raises `InvalidRequest`, naming the address and what became of it."""
        self.check(url)
        try:
            async with self._turns, asyncio.timeout(FETCH_S):
                return await self._fetch(url)
        except TimeoutError:
            raise _failed(url, f"it did not come within {FETCH_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failed(url, clipped(str(error), 200) or type(error).__name__) from None

    async def _fetch(self, url: str) -> bytes:
        # Nothing is unpacked: what is sent is what is counted.
        headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
        async with httpx.AsyncClient(headers=headers, timeout=FETCH_S) as client:
            at = url
            for _ in range(MAX_REDIRECTS + 1):
                async with client.stream("GET", at) as answer:
                    if not answer.has_redirect_location:
                        return await _body(url, answer)
                    at = urljoin(at, answer.headers["location"])
                    self.check(at)
        raise _failed(url, f"it was redirected more than {MAX_REDIRECTS} times")


async def _body(url: str, answer: httpx.Response) -> bytes:
    if answer.status_code != httpx.codes.OK:
        raise _failed(url, f"its server says {answer.status_code} {answer.reason_phrase}")
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) > MAX_IMAGE_BYTES:
            raise _failed(url, f"it has more than the {MAX_IMAGE_BYTES} bytes that an image may have")
    return bytes(body)


def check_hosts(hosts: Sequence[str]) -> None:
    """Raises `InvalidSetting` for what names no hosts."""
    for host in hosts:
        if not HOST.fullmatch(host):
            raise InvalidSetting(
                f"image_hosts must name hosts, as images.example or *.example:8443, got {host!r}", field="image_hosts"
            )


def is_address(file: bytes | str) -> TypeGuard[str]:
    """Is it an address to fetch from, rather than a file or a data URL?"""
    return isinstance(file, str) and file[:5].lower() != "data:"


def _fits(host: str, port: int, pattern: str) -> bool:
    name, _, wanted = pattern.partition(":")
    below = name.removeprefix("*")
    is_there = host == name or (below != name and host.endswith(below) and len(host) > len(below))
    return is_there and port == int(wanted or 443)


def _failed(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the image at {clipped(url, 200)} cannot be fetched: {why}", field="images")
