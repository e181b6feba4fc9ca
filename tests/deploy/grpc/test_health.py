"""Health and reflection over a real connection: what load balancers and command-line clients meet."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.grpc.reflection import SERVICE_NAMES
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.settings.limits import Limits
from intarsia.tests.deploy.scripted import ScriptedEngine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Watched:
    """What a load balancer hears, in a thread of its own."""

    def __init__(self, address: str, service: str = ""):
        self.heard: list[Any] = []
        self._channel = grpc.insecure_channel(address)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self.call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            for answer in self.call:
                self.heard.append(answer.status)
        except grpc.RpcError as error:
            self.heard.append(error.code())

    def until(self, *heard: Any) -> bool:
        deadline = time.monotonic() + 10
        while self.heard != list(heard) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.heard == list(heard)

    def close(self) -> None:
        self._channel.close()


Watch = Callable[..., Watched]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watches: list[Watched] = []

    def begin(address: str, service: str = "") -> Watched:
        watches.append(Watched(address, service))
        return watches[-1]

    yield begin
    for each in watches:
        each.close()


@pytest.mark.parametrize("service", ["", "intarsia.v1.Inference"])
def test_watchers_hear_that_the_engine_is_gone_and_back_and_that_the_server_leaves(
    serve_script: Any, watch: Watch, loop: Any, service: str
):
    engine, address = serve_script()
    watched = watch(address, service)
    assert watched.until(SERVING)
    loop.run(engine.go())
    assert watched.until(SERVING, NOT_SERVING)
    late = watch(address, service)
    assert late.until(NOT_SERVING)
    loop.run(engine.come_back())
    assert watched.until(SERVING, NOT_SERVING, SERVING)
    assert late.until(NOT_SERVING, SERVING)
    loop.run(engine.server.leave())
    assert watched.until(SERVING, NOT_SERVING, SERVING, NOT_SERVING)
    loop.run(engine.go())
    loop.run(engine.come_back())  # it leaves all the same
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status == NOT_SERVING
        listed = stub.List(health_pb2.HealthListRequest(), timeout=5).statuses  # type: ignore[attr-defined]
        assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
            ("", "intarsia.v1.Inference"), NOT_SERVING
        )


def test_a_service_that_is_not_there_is_unknown(serve_script: Any, watch: Watch):
    _, address = serve_script()
    assert watch(address, "no.such.Service").until(UNKNOWN)
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=5)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_watches_of_health_are_bounded(loop: Any, watch: Watch):
    async def start() -> tuple[GrpcServer, str]:
        limits = Limits(max_keyless_connections=3)
        server = GrpcServer(FrontEnd(ScriptedEngine([]), None, limits=limits))  # type: ignore[arg-type]
        return server, await server.start(port=0)

    server, address = loop.run(start())
    first = [watch(address) for _ in range(3)]
    assert all([each.until(SERVING) for each in first])
    assert watch(address).until(grpc.StatusCode.RESOURCE_EXHAUSTED)
    first[0].close()
    time.sleep(0.2)
    assert watch(address).until(SERVING)
    loop.run(server.stop(0))


@pytest.mark.parametrize("name", SERVICE_NAMES)
def test_reflection_of_both_versions_tells_the_services_and_itself(serve_script: Any, name: str):
    _, address = serve_script()
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="intarsia.v1.Inference"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Service"),
    ]
    with grpc.insecure_channel(address) as channel:
        talk: Any = channel.stream_stream(
            f"/{name}/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        services, ours, itself, nothing = talk(iter(asked), timeout=10)
    names = {service.name for service in services.list_services_response.service}
    assert {"intarsia.v1.Inference", "grpc.health.v1.Health", *SERVICE_NAMES} <= names
    assert ours.file_descriptor_response.file_descriptor_proto
    assert itself.file_descriptor_response.file_descriptor_proto
    assert nothing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
