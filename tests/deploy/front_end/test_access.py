"""Keys, TLS and addresses, on real servers with certificates made for the test."""

import contextlib
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import openai
import pytest
import trustme
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from starlette.routing import Route

from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.client import Client, Tls
from intarsia.deploy.front_end.access import ROUTES, RPCS, Access, AccessSettings, Level
from intarsia.deploy.front_end.front_end import Asked, FrontEnd, FrontEndSettings
from intarsia.deploy.grpc.reflection import SERVICE_NAMES
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.openai.kept import KeptResponses
from intarsia.deploy.openai.stored import ResponseStore, StoreSettings
from intarsia.deploy.settings.limits import Limits
from intarsia.deploy.tools.chat import ChatServer
from intarsia.deploy.tools.top import Server, fetch_snapshot
from intarsia.errors import EngineUnavailable, InvalidSetting, Overloaded, Unauthenticated
from intarsia.proto import inference_pb2 as pb
from intarsia.proto import inference_pb2_grpc as pb_grpc
from intarsia.proto.reply import Delta
from intarsia.proto.request import RequestOptions
from intarsia.tests.deploy.scripted import HANG, ScriptedEngine

SCRIPT = (Delta((5,)), Delta((6,), finish_reason="length"))


class Addresses(NamedTuple):
    http: str
    grpc: str
    front_end: FrontEnd


Start = Callable[..., Addresses]


@pytest.fixture
def start(loop: Any) -> Iterator[Start]:
    """Starts both servers in front of a scripted engine."""
    servers: list[Any] = []

    def begin(
        settings: AccessSettings, front_end_settings: FrontEndSettings | None = None, script: Any = SCRIPT
    ) -> Addresses:
        async def listen() -> Addresses:
            front_end = FrontEnd(ScriptedEngine(script), None, front_end_settings)  # type: ignore[arg-type]
            access = Access(settings)
            http, rpc = HttpServer(make_app(lambda: front_end, access), access), GrpcServer(front_end, access)
            servers.extend((http, rpc))
            return Addresses(await http.start(port=0), await rpc.start(port=0), front_end)

        return loop.run(listen())

    yield begin
    for server in servers:
        loop.run(server.stop())


class Files(NamedTuple):
    """Certificates of a server and of a client, and who signed them."""

    ca: str
    server: tuple[str, str]
    client: tuple[str, str]
    other_ca: str  # who signed neither


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder: Path = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))

    def pair(name: str, *identities: str) -> tuple[str, str]:
        issued = authority.issue_cert(*identities)
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        return str(folder / f"{name}.pem"), str(folder / f"{name}.key")

    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    return Files(
        str(folder / "ca.pem"),
        pair("server", "127.0.0.1", "localhost"),
        pair("client", "someone@example.org"),
        str(folder / "other.pem"),
    )


# -- keys ------------------------------------------------------------------------------------------------------------


def test_http_without_a_known_key_is_refused_except_for_health(start: Start):
    address = start(AccessSettings(api_key=("oak", "ash"))).http
    assert httpx.get(f"{address}/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer elm"}, {"Authorization": "Basic oak"}):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            refused = httpx.get(f"{address}{path}", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
    for key in ("oak", "ash"):
        assert openai.OpenAI(base_url=f"{address}/v1", api_key=key).models.list().data[0].id == "tiny-hybrid"
    with pytest.raises(openai.AuthenticationError, match="this key is not known here"):
        openai.OpenAI(base_url=f"{address}/v1", api_key="elm").models.list()


def test_grpc_without_a_known_key_is_refused_except_for_health(start: Start):
    address = start(AccessSettings(api_key=("oak",))).grpc
    with grpc.insecure_channel(address) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        assert check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="a key is wanted"):
            ProtoReflectionDescriptorDatabase(channel).get_services()
    for key in (None, "elm"):
        with Client(address, api_key=key) as client:
            with pytest.raises(Unauthenticated):
                list(client.generate([1, 2]))
            with pytest.raises(Unauthenticated):
                client.model_info()
    with Client(address, api_key="oak") as client:
        assert client.complete([1, 2]).token_ids == (5, 6)


def test_keys_come_from_a_file_too(start: Start, tmp_path: Path):
    (tmp_path / "keys").write_text("# of the carpentry\noak\n\n  ash  \n")
    address = start(AccessSettings(api_key_file=str(tmp_path / "keys"))).grpc
    for key in ("oak", "ash"):
        with Client(address, api_key=key) as client:
            assert client.complete([1, 2]).token_ids == (5, 6)
    assert "oak" not in repr(AccessSettings(api_key=("oak",)))


def test_every_route_and_every_rpc_has_its_level_declared(start: Start):
    kept = KeptResponses(ResponseStore(StoreSettings(), 0, Limits()), Limits())
    front_end = start(AccessSettings()).front_end
    app = make_app(lambda: front_end, kept=kept, interfaces=(add_messages,))
    routes = {route.path for route in app.routes if isinstance(route, Route)}
    assert routes == set(ROUTES)
    pool = descriptor_pool.Default()
    names = ("intarsia.v1.Inference", "grpc.health.v1.Health", *SERVICE_NAMES)
    services = [pool.FindServiceByName(name) for name in names]
    assert {f"/{each.full_name}/{method.name}" for each in services for method in each.methods} == set(RPCS)


def test_every_route_and_every_rpc_wants_what_its_level_says(start: Start):
    here = start(AccessSettings(api_key=("oak",), admin_key=("yew",)))
    for path, level in ROUTES.items():
        path = path.replace("{model:path}", "tiny-hybrid").replace("{response_id}", "resp_1")
        for key, opens in (("", ()), ("oak", (Level.KEY, Level.FIGURES)), ("yew", (Level.ADMIN, Level.FIGURES))):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            refused = [httpx.request(verb, here.http + path, headers=headers).status_code for verb in ("GET", "POST")]
            assert (refused == [401, 401]) == (level not in (Level.OPEN, *opens)), (path, key, refused)
    with grpc.insecure_channel(here.grpc) as channel:
        for method, level in RPCS.items():
            for key, opens in (("", ()), ("oak", (Level.KEY, Level.FIGURES)), ("yew", (Level.FIGURES,))):
                call: Any = channel.unary_stream(method)(
                    b"", metadata=(("authorization", f"Bearer {key}"),), timeout=0.5
                )
                with contextlib.suppress(grpc.RpcError):
                    next(iter(call), None)
                call.cancel()
                refused = call.code() is grpc.StatusCode.UNAUTHENTICATED
                assert refused == (level not in (Level.OPEN, *opens)), (method, key, call.code())


def test_the_tenant_of_a_key_is_whose_the_request_is_whatever_it_says(start: Start, tmp_path: Path):
    (tmp_path / "keys").write_text("oak carpenters\nash\n")
    here = start(AccessSettings(api_key_file=str(tmp_path / "keys")))
    engine: Any = here.front_end._engine
    for key, tenant, salt in (("oak", "carpenters", "carpenters"), ("ash", "mine", "")):
        with Client(here.grpc, api_key=key) as client:
            list(client.generate([1, 2], options=RequestOptions(tenant="mine")))
        assert (engine.options.tenant, engine.options.salt) == (tenant, salt)
        openai.OpenAI(base_url=f"{here.http}/v1", api_key=key).completions.create(
            model="tiny-hybrid", prompt=[1, 2], user="mine"
        )
        assert (engine.options.tenant, engine.options.salt) == (tenant, salt)


def test_a_tenant_cannot_stop_another_s_request(start: Start, tmp_path: Path):
    (tmp_path / "keys").write_text("oak carpenters\nash smiths\n")
    here = start(AccessSettings(api_key_file=str(tmp_path / "keys")), script=(Delta((5,)), HANG))
    with Client(here.grpc, api_key="oak") as mine, Client(here.grpc, api_key="ash") as theirs:
        answer: Any = mine.generate([1, 2], request_id="desk")
        next(answer)
        assert not theirs.abort("desk")
        assert mine.abort("desk")
        answer.close()


def test_a_line_of_a_key_file_with_more_than_a_key_and_a_tenant_is_refused(tmp_path: Path):
    (tmp_path / "keys").write_text("oak carpenters of York\n")
    with pytest.raises(InvalidSetting, match="entry 1 has 4 words; it needs a key and, after a space"):
        Access(AccessSettings(api_key_file=str(tmp_path / "keys")))


# -- certificates ----------------------------------------------------------------------------------------------------


def test_tls_is_spoken_by_both_servers(start: Start, files: Files):
    here = start(AccessSettings(ssl_certfile=files.server[0], ssl_keyfile=files.server[1]))
    assert here.http.startswith("https://")
    context = ssl.create_default_context(cafile=files.ca)
    assert httpx.get(f"{here.http}/v1/models", verify=context).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{here.http}/v1/models")  # by an authority that this machine does not know
    with Client(here.grpc, tls=Tls(ca_certs=files.ca)) as client:
        assert client.complete([1, 2]).token_ids == (5, 6)
    with Client(here.grpc, timeout_s=5) as client, pytest.raises(EngineUnavailable):
        client.model_info()


def test_a_client_without_tls_is_told_that_the_server_speaks_it(start: Start, files: Files):
    here = start(AccessSettings(ssl_certfile=files.server[0], ssl_keyfile=files.server[1]))
    unmet = pytest.raises(EngineUnavailable, match=r"speaks TLS.*--ssl-ca-certs FILE")
    with Client(here.grpc, timeout_s=20) as client, unmet:
        client.model_info()
    unmet = pytest.raises(EngineUnavailable, match=r"no authority known here has signed.*--ssl-ca-certs FILE")
    with Client(here.grpc, timeout_s=20, tls=Tls(ca_certs=files.other_ca)) as client, unmet:
        client.model_info()


@pytest.mark.parametrize("ask", [lambda url: fetch_snapshot(Server(url)), lambda url: ChatServer(url).model()])
def test_top_and_chat_are_told_whether_a_server_speaks_tls(start: Start, files: Files, ask: Callable):
    safe = start(AccessSettings(ssl_certfile=files.server[0], ssl_keyfile=files.server[1])).http
    with pytest.raises(InvalidSetting, match=r"no authority known here has signed.*--ssl-ca-certs FILE"):
        ask(safe)
    plain = safe.replace("https:", "http:")
    with pytest.raises(EngineUnavailable, match=f"{plain} cannot be asked: .*If it speaks TLS: --url {safe}"):
        ask(plain)
    other = start(AccessSettings()).http
    with pytest.raises(EngineUnavailable, match=f"If it speaks no TLS: --url {other}"):
        ask(other.replace("http:", "https:"))


def test_a_client_with_tls_is_told_that_the_server_speaks_none(start: Start, files: Files):
    here = start(AccessSettings())
    unmet = pytest.raises(EngineUnavailable, match=r"speaks no TLS; leave --ssl-ca-certs out")
    with Client(here.grpc, timeout_s=20, tls=Tls(ca_certs=files.ca)) as client, unmet:
        client.model_info()


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_client_without_the_key_is_told_how_to_give_one(start: Start, key: str | None):
    here = start(AccessSettings(api_key=("right",)))
    with Client(here.grpc, timeout_s=20, api_key=key) as client, pytest.raises(Unauthenticated, match="--api-key KEY"):
        client.model_info()


def test_clients_without_a_certificate_are_refused_where_one_is_wanted(start: Start, files: Files):
    here = start(AccessSettings(ssl_certfile=files.server[0], ssl_keyfile=files.server[1], ssl_ca_certs=files.ca))
    context = ssl.create_default_context(cafile=files.ca)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{here.http}/health", verify=context)
    context.load_cert_chain(*files.client)
    assert httpx.get(f"{here.http}/health", verify=context).status_code == 200
    with Client(here.grpc, timeout_s=5, tls=Tls(files.ca)) as client, pytest.raises(EngineUnavailable):
        client.model_info()
    with Client(here.grpc, tls=Tls(files.ca, *files.client)) as client:
        assert client.model_info().model == "tiny-hybrid"


# -- addresses and files ---------------------------------------------------------------------------------------------


def test_a_host_that_others_reach_wants_keys_and_tls_or_a_word(files: Files):
    keys: dict[str, Any] = {"api_key": ("oak",)}
    tls: dict[str, Any] = {"ssl_certfile": files.server[0], "ssl_keyfile": files.server[1]}
    for host in ("127.0.0.1", "::1", "localhost"):
        Access().check_host(host)
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        for given, missing in (({}, "no keys .* and TLS"), (keys, "no TLS"), (tls, "no keys")):
            with pytest.raises(InvalidSetting, match=missing) as refused:
                Access(AccessSettings(**given)).check_host(host)
            assert refused.value.field == "host"
        Access(AccessSettings(**keys, **tls)).check_host(host)
        Access(AccessSettings(insecure=True)).check_host(host)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"ssl_certfile": "server"}, "ssl_keyfile"),
        ({"ssl_keyfile": "server"}, "ssl_certfile"),
        ({"ssl_ca_certs": "ca"}, "ssl_ca_certs"),
        ({"ssl_certfile": "ca", "ssl_keyfile": "server"}, "ssl_certfile"),
        ({"ssl_certfile": "server", "ssl_keyfile": "missing"}, "ssl_certfile"),
        ({"ssl_certfile": "server", "ssl_keyfile": "server", "ssl_ca_certs": "missing"}, "ssl_ca_certs"),
        ({"api_key_file": "missing"}, "api_key_file"),
        ({"api_key_file": "empty"}, "api_key_file"),
        ({"api_key": ("",)}, "api_key"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(given: dict[str, Any], field: str, files: Files, tmp_path: Path):
    (tmp_path / "empty").write_text("# nothing\n")
    places = {
        ("ssl_certfile", "server"): files.server[0],
        ("ssl_certfile", "ca"): files.ca,
        ("ssl_keyfile", "server"): files.server[1],
        ("ssl_ca_certs", "ca"): files.ca,
    }
    settings: dict[str, Any] = {
        name: places.get((name, value), str(tmp_path / value)) if isinstance(value, str) else value
        for name, value in given.items()
    }
    with pytest.raises(InvalidSetting) as refused:
        Access(AccessSettings(**settings))
    assert refused.value.field == field


# -- as many as there may be -----------------------------------------------------------------------------------------


def test_more_streams_than_allowed_are_told_to_try_again(start: Start, loop: Any):
    here = start(AccessSettings(), FrontEndSettings(max_streams=1))

    async def begin() -> Any:
        from intarsia import SamplingParams

        return await here.front_end.generate(Asked([1], SamplingParams()))

    answers = loop.run(begin())
    refused = httpx.post(f"{here.http}/v1/completions", json={"prompt": [1]})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "max_streams is 1" in refused.json()["error"]["message"]
    with Client(here.grpc) as client, pytest.raises(Overloaded) as typed:
        client.complete([1])
    assert typed.value.retryable and typed.value.details["limit"] == "1"
    with grpc.insecure_channel(here.grpc) as channel, pytest.raises(grpc.RpcError) as raw:
        list(pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))))
    failed: Any = raw.value
    assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(failed.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    loop.run(answers.aclose())
    assert httpx.post(f"{here.http}/v1/completions", json={"prompt": [1]}).status_code == 200
