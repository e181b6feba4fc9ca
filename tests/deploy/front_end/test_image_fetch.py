import asyncio
import http.server
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import trustme

from intarsia.deploy.front_end import image_fetch
from intarsia.deploy.front_end.front_end import FrontEndSettings
from intarsia.deploy.front_end.image_fetch import ImageFetcher
from intarsia.deploy.front_end.images import MAX_IMAGE_BYTES
from intarsia.errors import InvalidRequest, InvalidSetting
from intarsia.tests.models import picture

OAK = picture(20, 20, seed=1)


class Pictures(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        where = {"/moved": "/oak.png", "/elsewhere": "https://other.example/oak.png", "/round": "/round"}.get(self.path)
        status = 302 if where else {"/gone": 404}.get(self.path, 200)
        body = b"" if where else b"\0" * (MAX_IMAGE_BYTES + 1) if self.path == "/large" else OAK
        if self.path == "/slow":
            time.sleep(2)
        self.send_response(status)
        if where:
            self.send_header("Location", where)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # of a picture that is too large, the fetcher does not read the rest
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(NamedTuple):
    host: str

    def url(self, path: str) -> str:
        return f"https://{self.host}{path}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Pictures over TLS, by an authority that this process trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    Pictures.asked = []
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield Server(f"localhost:{listening.server_address[1]}")
    listening.shutdown()
    listening.server_close()


def fetch(hosts: list[str], url: str) -> bytes:
    async def run() -> bytes:
        return await ImageFetcher(hosts).fetch(url)

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/oak.png", "/moved"])
def test_an_image_of_a_listed_host_is_fetched(server: Server, path: str):
    assert fetch([server.host], server.url(path)) == OAK


@pytest.mark.parametrize(
    "url",
    [
        "http://{host}/oak.png",
        "https://other.example/oak.png",
        "https://{host}.other.example/oak.png",
        "https://localhost/oak.png",  # another port
        "https://user:secret@{host}/oak.png",
        "https://user@localhost:1/oak.png",
        "https://[::1/oak.png",
        "https://localhost:99999/oak.png",
        "file:///etc/passwd",
        "ftp://{host}/oak.png",
        "/oak.png",
        "https:///oak.png",
        "https://" + "a" * 3000,
    ],
)
def test_nothing_else_is_fetched(server: Server, url: str):
    with pytest.raises(InvalidRequest) as refused:
        fetch([server.host], url.format(host=server.host))
    assert refused.value.field == "images" and not Pictures.asked


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/gone", "its server says 404 Not Found"),
        ("/large", f"more than the {MAX_IMAGE_BYTES} bytes"),
        ("/elsewhere", "not from https://other.example"),
        ("/round", "redirected more than 3 times"),
    ],
)
def test_what_does_not_come_is_told_with_its_reason(server: Server, path: str, why: str):
    with pytest.raises(InvalidRequest, match=why):
        fetch([server.host], server.url(path))


def test_a_slow_server_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_fetch, "FETCH_S", 0.2)
    with pytest.raises(InvalidRequest, match=r"within 0\.2 s"):
        fetch([server.host], server.url("/slow"))


def test_a_certificate_that_is_not_trusted_is_no_image(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        fetch([server.host], server.url("/oak.png"))
    assert not Pictures.asked


@pytest.mark.parametrize(
    ("host", "is_taken"), [("a.example", True), ("b.a.example", True), ("example", False), ("aexample", False)]
)
def test_a_star_stands_for_all_hosts_below(host: str, is_taken: bool):
    fetcher = ImageFetcher(["*.Example"])
    if is_taken:
        fetcher.check(f"https://{host}/x")
        return
    with pytest.raises(InvalidRequest, match=r"by https from \*\.example, and not from"):
        fetcher.check(f"https://{host}/x")


@pytest.mark.parametrize("host", ["", "*", "https://a.example", "a.example/x", "a b", "a.*.example", "a.example:port"])
def test_a_setting_that_names_no_host_is_refused(host: str):
    with pytest.raises(InvalidSetting, match="must name hosts"):
        FrontEndSettings(image_hosts=(host,))
