"""What is said of a Ray cluster that RAY_ADDRESS names, before Ray is asked."""

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from intarsia.deploy.start.before_ray import check_start
from intarsia.deploy.start.ray_address import CHECK_ALIVE, can_be_asked, check_address
from intarsia.deploy.tools import doctor
from intarsia.errors import EngineUnavailable, InvalidSetting
from intarsia.tests.conftest import free_port

TOKEN = "a token of the head"


class Head(grpc.GenericRpcHandler):
    """Answers as a GCS with token authentication does."""

    def service(self, handler_call_details: grpc.HandlerCallDetails):
        if handler_call_details.method != CHECK_ALIVE:
            return None
        shown = dict(handler_call_details.invocation_metadata).get("authorization")

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if shown != f"Bearer {TOKEN}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: missing or incorrect")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Its address, which RAY_ADDRESS names; there is no token at hand."""
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Head()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", address)
    yield address
    server.stop(None)


def test_who_shows_no_token_is_told_of_the_variable(head: str):
    with pytest.raises(EngineUnavailable, match="export RAY_AUTH_MODE=token") as refusal:
        check_start(is_insecure_fine=False)
    assert head in str(refusal.value)


def test_who_has_no_token_is_told_where_it_belongs(head: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(EngineUnavailable, match=r"there is none here.*auth_token"):
        check_address()


def test_another_token_is_told_from_none(head: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(EngineUnavailable, match="another token than this process"):
        check_address()


@pytest.mark.parametrize("place", ["variable", "named file", "usual file"])
def test_the_token_is_found_where_ray_finds_it(head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(f"{TOKEN}\n" if place == "usual file" else "old")
    (tmp_path / "named").write_text(TOKEN)
    if place == "variable":
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    if place == "named file":
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    check_start(is_insecure_fine=False)


def test_an_address_where_no_cluster_listens_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"no Ray cluster answers.*ray start --head"):
        check_address()
    assert time.monotonic() - began < 30


def test_what_takes_connections_and_says_nothing_is_no_cluster(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(EngineUnavailable, match="no Ray cluster answers there"):
            check_address()
    assert time.monotonic() - began < 60  # 4 s, and not the 200 that Ray takes


def test_a_web_server_is_no_cluster(monkeypatch: pytest.MonkeyPatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{web.server_address[1]}")
        with pytest.raises(EngineUnavailable, match="no Ray cluster answers there"):
            check_address()
        web.shutdown()


def test_a_server_of_ray_clients_is_asked_at_its_port(monkeypatch: pytest.MonkeyPatch):
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{port}")
    check_address()
    server.stop(0).wait()
    with pytest.raises(EngineUnavailable, match="no Ray cluster answers there"):
        check_address()


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_a_cluster_that_ray_chooses_is_left_to_ray(address: str, monkeypatch: pytest.MonkeyPatch):
    assert not can_be_asked(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_address()


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1", ":6379", "http://127.0.0.1:8265", "127.0.0.1:", "127.0.0.1:six", "h:99999"]
)
def test_what_is_no_address_is_told_what_one_looks_like(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InvalidSetting, match="HOST:PORT"):
        check_address()


def test_the_doctor_tells_refused_from_absent(head: str, monkeypatch: pytest.MonkeyPatch):
    [refused] = doctor.CHECKS["ray cluster"]()
    assert not refused.is_fine and "refuses" in refused.fact and "RAY_AUTH_MODE=token" in refused.advice
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    [fine] = doctor.CHECKS["ray cluster"]()
    assert fine.is_fine and fine.fact == f"{head} answers"
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    [absent] = doctor.CHECKS["ray cluster"]()
    assert not absent.is_fine and "does not answer" in absent.fact
