"""What a client may send over HTTP, on a real server and real sockets."""

import contextlib
import gc
import json
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import trustme

from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.limits import Limits
from intarsia.proto.reply import Delta
from intarsia.tests.deploy.scripted import ScriptedEngine

SCRIPT = (Delta((5,)), Delta((6,), finish_reason="length"))

KIB, MIB = 2**10, 2**20


class Door(NamedTuple):
    url: str
    address: tuple[str, int]
    engine: ScriptedEngine
    app: Any


@pytest.fixture
def door(loop: Any) -> Iterator[Callable[..., Door]]:
    """Starts a server in front of a scripted engine, with these limits."""
    servers: list[Any] = []

    def start(access: AccessSettings | None = None, root_path: str = "", **limits: float) -> Door:
        async def listen() -> Door:
            engine: Any = ScriptedEngine(SCRIPT)
            wanted, guard = Limits(**limits), Access(access)  # type: ignore[arg-type]
            front_end = FrontEnd(engine, None, limits=wanted)
            app = make_app(lambda: front_end, guard, limits=wanted, root_path=root_path)
            server = HttpServer(app, guard, wanted)
            servers.append(server)
            url = await server.start(port=0)
            return Door(url, ("127.0.0.1", int(url.rpartition(":")[2])), engine, app)

        return loop.run(listen())

    yield start
    for server in servers:
        loop.run(server.stop())


def answer_to(door: Door, *pieces: bytes, wait_s: float = 10.0) -> bytes:
    """What comes back until the server closes, or has answered and waits."""
    with socket.create_connection(door.address, timeout=wait_s) as client:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                client.sendall(piece)
        return read_to_end(client)


def read_to_end(client: socket.socket) -> bytes:
    told = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            told += part
    return told


def post(door: Door, path: str, body: bytes, **headers: str) -> httpx.Response:
    headers = {"Content-Type": "application/json"} | headers
    return httpx.post(door.url + path, content=body, headers=headers, timeout=60)


# -- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200_000,
        b"GET /health HTTP/1.1\r\na: " + b"b" * 2_000_000,
        b"GET /" + b"a" * 2_000_000,
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"e" * 2_000_000,
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"a: b\r\n" * 200_000,
    ],
    ids=["many headers", "one header", "a URL", "a chunk's extension", "trailers"],
)
def test_what_has_no_end_and_is_no_body_ends_the_connection(door: Callable[..., Door], flood: bytes):
    here = door()
    told = answer_to(here, *(flood[n : n + 64 * KIB] for n in range(0, len(flood), 64 * KIB)))
    assert told == b"" or told.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert httpx.get(f"{here.url}/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"BREW / HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\na\x00: b\r\n\r\n",
        b"\x16\x03\x01",
    ],
    ids=["a method", "a version", "a header", "a handshake of TLS"],
)
def test_what_cannot_be_read_as_http_is_told_so_in_json(door: Callable[..., Door], sent: bytes):
    told = answer_to(door(), sent)
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"application/json" in head
    assert "not HTTP/1.1" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(("headers", "status"), [(100, 200), (200, 431)], ids=["as many as may be", "more than may be"])
def test_number_of_headers_is_limited_and_told(door: Callable[..., Door], headers: int, status: int):
    sent = {f"x-{n}": "1" for n in range(headers)}
    answer = httpx.get(f"{door().url}/health", headers=sent)
    assert answer.status_code == status
    if status == 431:
        assert "65536 bytes and 128 headers at most" in answer.json()["error"]["message"]


def test_a_head_of_64_kib_is_read_and_one_byte_too_many_is_told(door: Callable[..., Door]):
    here = door()
    assert httpx.get(f"{here.url}/health", headers={"x": "y" * (60 * KIB)}).status_code == 200
    assert httpx.get(f"{here.url}/health", headers={"x": "y" * (66 * KIB)}).status_code == 431


@pytest.mark.parametrize("begun", [b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
def test_half_a_head_is_waited_for_only_so_long(door: Callable[..., Door], begun: bytes):
    here = door(head_timeout_s=0.3)
    assert answer_to(here, begun).startswith(b"HTTP/1.1 408")


def test_a_head_in_single_bytes_does_not_extend_its_time(door: Callable[..., Door]):
    here = door(head_timeout_s=0.5)
    with socket.create_connection(here.address, timeout=10) as client:
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /health HTTP/1.1\r\nx: ")
            while time.monotonic() < began_s + 10 and not _has_answer(client):
                client.sendall(b"y")
                time.sleep(0.02)
        assert read_to_end(client).startswith(b"HTTP/1.1 408")
        assert time.monotonic() < began_s + 8


def _has_answer(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        client.setblocking(True)
        client.settimeout(10)


def test_a_connection_that_says_nothing_is_closed_and_so_is_one_between_requests(door: Callable[..., Door]):
    here = door(idle_timeout_s=0.3)
    assert answer_to(here) == b""
    told = answer_to(here, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200") and told.endswith(b'{"status":"ok"}')


def test_pipelined_requests_are_answered_in_turn_also_in_odd_pieces(door: Callable[..., Door]):
    body = b'{"prompt": [1], "max_tokens": 2}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    sent = (post % (len(body), body) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") * 30
    told = answer_to(door(idle_timeout_s=0.5), *(sent[n : n + 700] for n in range(0, len(sent), 700)))
    assert told.count(b"HTTP/1.1 200") == 60


def test_requests_whose_answers_are_not_read_are_not_heaped_up(door: Callable[..., Door]):
    """4 connections that send and do not read took a gigabyte."""
    here = door(unread_timeout_s=2)
    asked = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
    with socket.create_connection(here.address, timeout=1) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < 200 * MIB:
                sent += client.send(asked)
        assert sent < 50 * MIB
        assert httpx.get(f"{here.url}/health").status_code == 200


# -- bodies ----------------------------------------------------------------------------------------------------------


def chunked(path: bytes, count: int, size: int) -> Iterator[bytes]:
    yield b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    for _ in range(count):
        yield b"%x\r\n%s\r\n" % (size, b" " * size)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_a_refused_body_is_not_read_on_for_ever(door: Callable[..., Door], path: bytes):
    here = door(max_body_bytes=MIB)
    with socket.create_connection(here.address, timeout=10) as client:
        sent = 0
        with contextlib.suppress(ConnectionError):
            for piece in chunked(path, 1000, 64 * KIB):
                client.sendall(piece)
                sent += len(piece)
        assert sent < 40 * MIB
        told = read_to_end(client)
    assert told == b"" or told.startswith((b"HTTP/1.1 413", b"HTTP/1.1 404"))


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(door: Callable[..., Door]):
    told = answer_to(door(), b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 413") and b"99999999999 bytes; the limit is 33554432" in told


def test_the_answer_to_a_small_body_that_was_refused_early_is_read_and_the_connection_goes_on(
    door: Callable[..., Door],
):
    here = door(AccessSettings(api_key=("oak",)))
    with httpx.Client() as client:
        for key, status in (("elm", 401), ("oak", 200), ("elm", 401)):
            asked = {"prompt": [1, 2], "max_tokens": 2}
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post(f"{here.url}/v1/completions", json=asked, headers=headers).status_code == status


@pytest.mark.parametrize("count", [1, 1_000_000], ids=["hardly begun", "all but the end"])
def test_a_body_that_stops_coming_is_refused(door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch, count: int):
    monkeypatch.setattr("intarsia.deploy.openai.door.WINDOW_S", 0.3)
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (count + 1)
    told = answer_to(door(), head, b" " * count)
    assert told.startswith(b"HTTP/1.1 408") and b"%d bytes of the body have come" % count in told


def test_half_sent_bodies_are_counted_by_key_and_given_back(door: Callable[..., Door]):
    keys = AccessSettings(api_key=("oak", "ash"))
    here = door(keys, max_key_bodies_bytes=MIB)
    half = (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer oak\r\nContent-Length: 999999\r\n\r\n"
        + b" " * (700 * KIB)
    )
    asked = {"prompt": [1], "max_tokens": 2, "user": "u" * 100}
    large = json.dumps(asked).encode() + b" " * (500 * KIB)

    def status(key: str) -> int:
        return post(here, "/v1/completions", large, Authorization=f"Bearer {key}").status_code

    with socket.create_connection(here.address, timeout=10) as client:
        client.sendall(half)
        until_s = time.monotonic() + 10
        while status("oak") != 429 and time.monotonic() < until_s:
            time.sleep(0.05)
        refused = post(here, "/v1/completions", large, Authorization="Bearer oak")
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert "bodies of this key are being read" in refused.json()["error"]["message"]
        assert status("ash") == 200
    while status("oak") != 200:
        assert time.monotonic() < until_s
        time.sleep(0.05)


# -- connections -----------------------------------------------------------------------------------------------------


def test_idle_connections_without_a_key_make_room_for_new_ones(door: Callable[..., Door]):
    here = door(AccessSettings(api_key=("oak",)), max_keyless_connections=5)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(here.address, timeout=10)) for _ in range(20)]
        with httpx.Client(headers={"Authorization": "Bearer oak"}) as client:
            assert client.get(f"{here.url}/v1/models").status_code == 200
            more = [stack.enter_context(socket.create_connection(here.address, timeout=10)) for _ in range(20)]
            assert read_to_end(silent[0]) == read_to_end(more[0]) == b""
            assert client.get(f"{here.url}/v1/models").status_code == 200


def test_a_key_has_so_many_connections_and_no_other_key_is_concerned(door: Callable[..., Door]):
    here = door(AccessSettings(api_key=("oak", "ash")), max_key_connections=3)

    def ask(key: str) -> tuple[httpx.Client, httpx.Response]:
        client = stack.enter_context(httpx.Client(headers={"Authorization": f"Bearer {key}"}))
        return client, client.get(f"{here.url}/v1/models")

    with contextlib.ExitStack() as stack:
        opened = [ask("oak") for _ in range(4)]
        assert [answer.status_code for _, answer in opened] == [200, 200, 200, 429]
        assert "max_key_connections" in opened[3][1].json()["error"]["message"]
        assert ask("ash")[1].status_code == 200
        opened[0][0].close()
        until_s = time.monotonic() + 10
        while ask("oak")[1].status_code != 200:
            assert time.monotonic() < until_s
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "begun"),
    [
        ("/v1/completions", b'{"prompt": '),
        pytest.param("/tokenize", b'{"prompt": ', marks=pytest.mark.slow),
        pytest.param("/v1/completions", b'{"no such thing": ', marks=pytest.mark.slow),
    ],
)
def test_of_refused_bodies_nothing_is_kept(door: Callable[..., Door], path: str, begun: bytes):
    here = door()
    body = begun + b'"' + b"a" * (8 * MIB) + b'"}'
    assert post(here, path, body).status_code == 400
    gc.collect()
    gc.disable()
    try:
        before = resident_bytes()
        for _ in range(20):
            post(here, path, body)
        assert resident_bytes() - before < 10 * len(body)
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> AccessSettings:
    folder = tmp_path_factory.mktemp("certificate")
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(folder / "one.pem"))
    issued.private_key_pem.write_to_path(str(folder / "one.key"))
    return AccessSettings(ssl_certfile=str(folder / "one.pem"), ssl_keyfile=str(folder / "one.key"))


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_tls_that_is_never_agreed_on_is_ended_by_time_and_makes_room(
    door: Callable[..., Door], certificate: AccessSettings, begun: bytes
):
    here = door(certificate, head_timeout_s=0.5, max_connections=8)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(here.address, timeout=10)) for _ in range(20)]
        for each in clients:
            with contextlib.suppress(ConnectionError):
                each.sendall(begun)
        assert httpx.get(f"{here.url}/health", verify=trusting()).status_code == 200
        assert not any(read_to_end(each) for each in clients if begun != b"GET / HTTP/1.1\r\n\r\n")


def test_over_tls_heads_are_bounded_and_requests_answered(door: Callable[..., Door], certificate: AccessSettings):
    here = door(certificate)
    with httpx.Client(verify=trusting()) as client:
        for _ in range(3):
            assert client.get(f"{here.url}/health").status_code == 200
        answer = client.post(f"{here.url}/v1/completions", json={"prompt": [1] * 900, "max_tokens": 2})
        assert answer.status_code == 200
        assert client.get(f"{here.url}/health", headers={"a": "b" * 90_000}).status_code == 431


def test_what_comes_right_behind_the_handshake_is_read(door: Callable[..., Door], certificate: AccessSettings):
    here = door(certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting().wrap_bio(incoming, outgoing)
    with socket.create_connection(here.address, timeout=10) as raw:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(65536))
        client.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        raw.sendall(outgoing.read())  # the handshake's last words and the request in one piece
        told = b""
        while not told.startswith(b"HTTP/1.1 200"):
            incoming.write(raw.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                told += client.read()


# -- what is in a body -----------------------------------------------------------------------------------------------


def items(count: int, one: bytes) -> bytes:
    return b"[" + b",".join([one] * count) + b"]"


MANY = 1_000_000


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        ("/v1/completions", b'{"prompt": %s}' % items(MANY, b"{}"), "more than 262144 values", None),
        ("/v1/chat/completions", b'{"messages": %s}' % items(MANY, b"1"), "more than 262144 values", None),
        ("/v1/completions", b'{"prompt": "x", "stop_token_ids": %s}' % items(MANY, b"1"), "262144 values", None),
        ("/detokenize", b'{"tokens": %s}' % items(MANY, b"1"), "more than 262144 values", None),
        ("/v1/completions", b'{"prompt": %s}' % items(100_000, b"{}"), "prompt has 100000 prompts", "prompt"),
        ("/v1/completions", b'{"prompt": %s}' % items(200_000, b"1"), "prompt has 200000 tokens", "prompt"),
        ("/v1/completions", b'{"prompt": [%s]}' % items(2_000, b"1"), "prompt.0 has 2000 tokens", "prompt.0"),
        ("/v1/completions", b'{"prompt": %s}' % items(3000, b'"x"'), "prompt has 3000 prompts; at most 2048", "prompt"),
        (
            "/v1/completions",
            b'{"prompt": "x", "stop_token_ids": %s}' % items(2000, b"1"),
            "stop_token_ids has 2000 tokens; at most 1024",
            "stop_token_ids",
        ),
        ("/v1/chat/completions", b'{"messages": %s}' % items(5000, b"1"), "messages has 5000", "messages"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": %s}]}' % items(5000, b"1"),
            "messages.0.content has 5000 parts",
            "messages.0.content",
        ),
        ("/v1/chat/completions", b'{"messages": [], "tools": %s}' % items(200, b"1"), "tools has 200", "tools"),
        ("/v1/responses", b'{"input": %s}' % items(5000, b"1"), "input has 5000 items", "input"),
        ("/v1/completions", b'{"prompt": %s1%s}' % (b"[" * 100, b"]" * 100), "more than 64 levels", None),
        ("/v1/completions", b'{"prompt": %s' % (b"[" * 100_000), "more than 64 levels", None),
        ("/v1/completions", b'{"%s": 1, "prompt": "x"}' % (b"k" * 5_000_000), "Unknown parameter: ", None),
        ("/v1/completions", b'{"prompt": "x", %s}' % b",".join(b'"k%d": 1' % n for n in range(9000)), "members", None),
        (
            "/v1/completions",
            b'{"prompt": "x", "logit_bias": {%s}}' % b",".join(b'"a%d": 1' % n for n in range(9000)),
            "logit_bias has 9000 members",
            "logit_bias",
        ),
        ("/v1/completions", b'{"prompt": [1], "seed": %s}' % (b"9" * 1_000_000), "the body is no JSON", None),
        ("/v1/completions", b'{"prompt": [1], "max_tokens": "%s"}' % (b"9" * 3_000_000), "max_tokens: ", "max_tokens"),
        ("/v1/completions", b'{"prompt": [1], "request_id": "%s"}' % (b"a" * 200), "at most 128", "request_id"),
        ("/v1/completions", b'{"prompt": [1], "request_id": "a\\u0007"}', "printable ASCII", "request_id"),
        ("/v1/completions", b'{"prompt": "%s\\ud800"}' % (b"x" * 30_000), "half of a surrogate pair", None),
        ("/tokenize", b'{"prompt": "\xed\xa0\x80\xed\xbf\xbf"}', "it is no UTF-8 from byte 12 on", None),
        ("/tokenize", '{"prompt": "x"}'.encode("utf-16"), "it is no UTF-8", None),
        ("/v1/completions", b'{"prompt": [1], "top_p": %s}' % items(100_000, b"1"), "top_p: ", "top_p"),
    ],
)  # fmt: skip
def test_a_body_of_too_much_is_refused_in_a_sentence_and_soon(
    door: Callable[..., Door], path: str, body: bytes, words: str, param: str | None
):
    here = door()
    began_s = time.monotonic()
    answer = post(here, path, body)
    assert time.monotonic() - began_s < 20, "it took long, even for a busy machine"
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error["message"][:300]
    assert len(error["message"]) < 500 and len(error["param"] or "") < 200
    if param is not None:
        assert error["param"] == param
    assert not here.engine.asked


@pytest.mark.parametrize("messages", [b"5e-324", b"NaN", b"true", b'"x"', b'{"a": 1}', b"[1]", b"[[]]"])
def test_messages_that_are_no_list_of_messages_are_refused(door: Callable[..., Door], messages: bytes):
    answer = post(door(), "/v1/chat/completions", b'{"messages": %s}' % messages)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages")


def test_a_long_body_is_read_beside_the_loop_and_says_the_same(door: Callable[..., Door]):
    here = door()
    short: dict[str, Any] = {"prompt": [[1] * 10, [2] * 10], "max_tokens": 2, "logit_bias": {"7": 1}}
    for asked in (short, short | {"prompt": [[1] * 900, [2] * 900] * 30}):
        assert post(here, "/v1/completions", json.dumps(asked).encode()).status_code == 200
        assert here.engine.asked[-1][0] in asked["prompt"]
        wrong = post(here, "/v1/completions", json.dumps(asked | {"max_token": 3}).encode()).json()["error"]
        assert wrong["message"] == "Unknown parameter: 'max_token' of /v1/completions. Did you mean max_tokens?"
        assert wrong["param"] == "max_token"


# -- below another path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "root", "key", "status"),
    [
        ("/llm/console/view", "/llm", "oak", 401),
        ("/llm/console/view", "/llm", "elm", 200),
        ("/llm/health", "/llm", None, 200),
        ("/llm/console", "/llm", None, 200),
        ("/llm/v1/models", "/llm", None, 401),
        ("/llm/v1/models", "/llm", "oak", 200),
        ("/llmx/console/view", "/llm", "oak", 404),
        ("/llm//console/view", "/llm", "oak", 404),
        ("/console/view", "/llm", "oak", 401),
        ("/console/view", "/llm", "elm", 200),
        ("/health", "", None, 200),
    ],
)
def test_below_a_root_path_each_key_opens_what_it_opens_at_the_top(
    door: Callable[..., Door], loop: Any, path: str, root: str, key: str | None, status: int
):
    app = door(AccessSettings(api_key=("oak",), admin_key=("elm",))).app
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": root, "query_string": b"",
        "headers": [(b"authorization", b"Bearer " + key.encode())] if key else [],
    }  # fmt: skip
    told = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    async def call() -> None:
        with contextlib.suppress(Exception):  # a scripted engine has nothing to view
            await app(scope, receive, send)

    loop.run(call())
    seen = told[0]["status"] if told else 200
    assert (seen == 401) == (status == 401) and (seen == 404) == (status == 404)


def test_with_a_root_path_requests_come_with_it_or_without_and_the_keys_are_the_same(door: Callable[..., Door]):
    here = door(AccessSettings(api_key=("oak",), admin_key=("elm",)), root_path="/llm")
    for path, key, status in (
        ("/v1/models", "oak", 200), ("/llm/v1/models", "oak", 200), ("/llm/v1/models", "elm", 401),
        ("/llm/console/view", "oak", 401), ("/console/view", "oak", 401), ("/llm/llm/console/view", "oak", 404),
        ("/llm/health", "", 200), ("/llmx/health", "oak", 404), ("//llm/console/view", "oak", 404),
    ):  # fmt: skip
        answer = httpx.get(here.url + path, headers={"Authorization": f"Bearer {key or 'none'}"})
        assert answer.status_code == status, path
    assert httpx.get(f"{here.url}/openapi.json", headers={"Authorization": "Bearer oak"}).json()["servers"] == [
        {"url": "/llm"}
    ]


def test_no_limit_of_the_door_is_written_twice():
    """Numbers of the table stand in the table alone."""
    folder = Path(__file__).parents[3] / "deploy"
    texts = {path.name: path.read_text() for path in folder.rglob("*.py") if path.name != "limits.py"}
    assert not [name for name, text in texts.items() if "MAX_BODY_BYTES" in text or "32 * 2**20" in text]
