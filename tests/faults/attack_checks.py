"""What one key may learn of another, and small things of the door: each asked once, without traffic beside it."""

import contextlib
import json
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from intarsia.proto import inference_pb2 as pb

from .served import Target

PROMPT_TOKENS = 960
ANSWER_S = 30.0
WATCH_S = 3.0

Found = dict[str, Any]
Check = Callable[[Target], Found]

CHECKS: dict[str, Check] = {}


def check(ask: Check) -> Check:
    """Registers it. It returns what it found, with `fine` among it."""
    CHECKS[ask.__name__] = ask
    return ask


def _post(target: Target, tenant: str, path: str, body: Found, headers: dict[str, str] | None = None) -> Any:
    import httpx

    host, port = target.http
    headers = {"Authorization": f"Bearer {target.keys[tenant]}"} | (headers or {})
    return httpx.post(f"http://{host}:{port}{path}", json=body, headers=headers, timeout=ANSWER_S)


def _metrics(target: Target, tenant: str) -> dict[str, float]:
    import httpx

    host, port = target.http
    headers = {"Authorization": f"Bearer {target.keys[tenant]}"}
    said = httpx.get(f"http://{host}:{port}/metrics", headers=headers, timeout=ANSWER_S).text
    lines = [line.rpartition(" ") for line in said.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def _metadata(target: Target, tenant: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {target.keys[tenant]}")]


def _ask(target: Target, tenant: str, prompt: list[int]) -> None:
    answer = _post(target, tenant, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    assert answer.status_code == 200, answer.text


TIMED = re.compile(r"seconds|latency|time|_us\b|cpu|memory|created")
"""Figures that differ from call to call by themselves."""


@check
def figures_of_others(target: Target) -> Found:
    """4. bob asks what alice has asked, and what is new: no figure that he can read may tell one from the other."""
    rng = random.Random(11)
    rises: list[dict[str, float]] = []
    hers, new_ones = ([rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    _ask(target, "alice", hers)
    for prompt in (hers, new_ones):
        before = _metrics(target, "bob")
        _ask(target, "bob", prompt)
        after = _metrics(target, "bob")
        rises.append({name: value - before.get(name, 0.0) for name, value in after.items() if not TIMED.search(name)})
    known, unknown = rises
    telling = {name: [known[name], unknown.get(name)] for name in known if known[name] != unknown.get(name)}
    return {"fine": not telling, "rise if alice asked it, if it is new": telling}


@check
def cache_events_of_others(target: Target) -> Found:
    """Low. bob watches the cache, and alice asks: nothing may come to him."""
    came: list[int] = []
    with grpc.insecure_channel(target.grpc) as channel:
        watch: Any = channel.unary_stream("/intarsia.v1.Inference/WatchCacheEvents")
        call = watch(b"", metadata=_metadata(target, "bob"), timeout=ANSWER_S)

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                for message in call:
                    events = pb.CacheEvents.FromString(message).events
                    came.append(sum(len(event.stored.hashes) for event in events))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        time.sleep(WATCH_S)
        before = sum(came)
        rng = random.Random(12)
        _ask(target, "alice", [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)])
        time.sleep(WATCH_S)
        seen = sum(came) - before
        call.cancel()
        reader.join(5)
    return {"fine": seen == 0, "names of alice's blocks that came to bob": seen}


@contextlib.contextmanager
def _held(target: Target, tenant: str, request_id: str) -> Iterator[Any]:
    """A request that runs."""
    sampling = pb.SamplingParams(max_tokens=1500, ignore_eos=True)
    payload = pb.GenerateRequest(text="a", request_id=request_id, sampling=sampling).SerializeToString()
    with grpc.insecure_channel(target.grpc) as channel:
        ask: Any = channel.unary_stream("/intarsia.v1.Inference/Generate")
        call = ask(payload, metadata=_metadata(target, tenant), timeout=ANSWER_S)
        next(call)
        yield call
        call.cancel()


@check
def request_ids_of_others(target: Target) -> Found:
    """12. bob holds an id: alice may use it too, over HTTP and gRPC; she neither learns of his nor can end it."""
    name = f"held-{uuid.uuid4().hex[:8]}"
    with _held(target, "bob", name) as his:
        answer = _post(target, "alice", "/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": name})
        over_grpc = "OK"
        try:
            with _held(target, "alice", name):
                pass
        except grpc.RpcError as raised:
            error: Any = raised
            over_grpc = f"{error.code().name}: {error.details()}"
        found = _abort(target, "alice", name)
        goes_on = bool(next(his, None))
    return {
        "fine": answer.status_code == 200 and over_grpc == "OK" and goes_on,
        "HTTP": answer.status_code,
        "gRPC": over_grpc,
        "alice's abort found": found,
        "bob's goes on": goes_on,
    }


def _abort(target: Target, tenant: str, request_id: str) -> bool:
    with grpc.insecure_channel(target.grpc) as channel:
        call: Any = channel.unary_unary("/intarsia.v1.Inference/Abort")
        payload = pb.AbortRequest(request_id=request_id).SerializeToString()
        return pb.AbortResponse.FromString(call(payload, metadata=_metadata(target, tenant), timeout=ANSWER_S)).found


@check
def own_request_can_be_ended(target: Target) -> Found:
    """12. What is a tenant's own stays so: bob ends his own request by its id."""
    name = f"own-{uuid.uuid4().hex[:8]}"
    with _held(target, "bob", name):
        found = _abort(target, "bob", name)
    return {"fine": found, "found": found}


@check
def ids_that_cannot_be_printed(target: Target) -> Found:
    """12. Ids that are long or not printable are refused, by both servers alike."""
    got: dict[str, str] = {}
    for what, name in (("long", "x" * 5000), ("line", "a\r\nb"), ("blank", "a b"), ("zero", "a\0b"), ("letters", "é")):
        answer = _post(target, "bob", "/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": name})
        got[f"HTTP {what}"] = str(answer.status_code)
        try:
            with _held(target, "bob", name):
                got[f"gRPC {what}"] = "OK"
        except grpc.RpcError as raised:
            error: Any = raised
            got[f"gRPC {what}"] = error.code().name
    return {"fine": set(got.values()) == {"400", "INVALID_ARGUMENT"}, "got": got}


@check
def health_watch(target: Target) -> Found:
    """9. grpc.health.v1.Health/Watch says at once how it is, and goes on."""
    with grpc.insecure_channel(target.grpc) as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        call = watch(health_pb2.HealthCheckRequest().SerializeToString(), timeout=2)
        said, ended = "", ""
        try:
            said = health_pb2.HealthCheckResponse.ServingStatus.Name(
                health_pb2.HealthCheckResponse.FromString(next(call)).status
            )
            next(call)
        except grpc.RpcError as raised:
            error: Any = raised
            ended = f"{error.code().name}: {error.details()}"
    return {"fine": said == "SERVING" and ended.startswith("DEADLINE"), "said": said, "ended": ended}


@check
def reflection(target: Target) -> Found:
    """9. Reflection v1 beside v1alpha."""
    got: dict[str, str] = {}
    request = b"\x3a\x00"  # list_services: ""
    for version in ("v1", "v1alpha"):
        with grpc.insecure_channel(target.grpc) as channel:
            call: Any = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            try:
                answer = next(call(iter([request]), metadata=_metadata(target, "bob"), timeout=10))
                got[version] = "names it" if b"intarsia.v1.Inference" in answer else repr(answer)[:100]
            except grpc.RpcError as raised:
                error: Any = raised
                got[version] = error.code().name
    return {"fine": set(got.values()) == {"names it"}, "got": got}


CONSOLE_PATHS = (
    "/console/view", "//console/view", "/console//view", "/console/view/", "/%63onsole/view", "/x/../console/view",
    "/console/view?x=1", "/console/view;x", "/CONSOLE/VIEW", "/llm/console/view",
)  # fmt: skip


@check
def console_of_others(target: Target) -> Found:
    """A tenant's key does not open the console, whatever the path looks like."""
    import http.client

    got: dict[str, int] = {}
    for path in CONSOLE_PATHS:
        connection = http.client.HTTPConnection(*target.http, timeout=ANSWER_S)
        connection.request("GET", path, headers={"Authorization": f"Bearer {target.keys['bob']}"})
        answer = connection.getresponse()
        if answer.status == 200:
            with contextlib.suppress(ValueError):
                json.loads(answer.read())
        got[path] = answer.status
        connection.close()
    return {"fine": 200 not in got.values() and 500 not in got.values(), "got": got}


@check
def refusals_are_heard(target: Target) -> Found:
    """Who sends a body that is not wanted hears why, although the server does not read all of it."""
    import httpx

    host, port = target.http
    got: dict[str, list[str]] = {}
    good = f"Bearer {target.keys['bob']}"
    for what, size, authorization in (("no key", 5_000_000, "x"), ("too large", 40_000_000, good)):
        for _ in range(5):
            try:
                answer = httpx.post(
                    f"http://{host}:{port}/v1/completions",
                    content=b"a" * size,
                    headers={"Authorization": authorization, "Content-Type": "application/json"},
                    timeout=ANSWER_S,
                )
                got.setdefault(what, []).append(str(answer.status_code))
            except httpx.HTTPError as error:
                got.setdefault(what, []).append(type(error).__name__)
    return {"fine": set(got["no key"]) == {"401"} and set(got["too large"]) == {"413"}, "got": got}
