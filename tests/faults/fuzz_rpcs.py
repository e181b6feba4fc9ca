"""gRPC requests that are wrong in every way, made at random from the descriptors of every RPC there is."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from intarsia.deploy.front_end.access import RPCS, Level
from intarsia.proto import inference_pb2 as pb

from .fuzz import garbled

SERVICES = {
    service.full_name: service
    for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
}

WHOLE_NUMBERS = (0, 1, -1, 2, 5, 255, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
NUMBERS = (0.0, -1.0, 0.5, 1.0, 1e30, float("nan"), float("inf"), -float("inf"), 5e-324)
TEXTS = (
    "",
    "Hello",
    "\0",
    "x" * 5000,
    "{",
    "(",
    "[a-z]{3}",
    '{"type":"integer"}',
    "é\U0001f600",
    "same",
    "../../etc/passwd",
)

MOST_REPEATED = 2000


class Rpc(NamedTuple):
    """One call, as bytes."""

    method: str  # with its service
    messages: list[bytes]  # one, or what is wrong
    metadata: list[tuple[str, Any]]
    may_enter: bool | None  # false: without a key that opens it; None: there is no such method
    timeout_s: float
    leaves_after: int | None  # messages, then the client cancels; None: it stays
    is_proto: bool  # false: the bytes may be no message at all


def rpc_case(rng: random.Random, keys: Mapping[str, str], admin_key: str) -> Rpc:
    """keys: by tenant."""
    method = "/intarsia.v1.Inference/Generate" if rng.random() < 0.3 else rng.choice(list(RPCS))
    payload = request_bytes(rng, method)
    is_proto = rng.random() > 0.15
    if not is_proto:
        payload = garbled(rng, payload) if rng.random() < 0.8 else rng.randbytes(rng.choice((1, 30, 3000)))
    messages = [payload] if rng.random() > 0.03 else [payload] * rng.choice((0, 2, 5))
    metadata, opens = _metadata(rng, keys, admin_key, RPCS[method])
    if rng.random() < 0.02:
        method, opens = (
            rng.choice(("/x/y", method + "x", "/intarsia.v1.Inference/", "/intarsia.v2.Inference/Generate")),
            None,
        )
    timeout_s = rng.choice((0.001, 0.02, 0.3)) if rng.random() < 0.1 else 30.0
    if not messages:
        timeout_s = 0.3  # for which gRPC waits as long as the call may last
    leaves = rng.choice((0, 1, 3)) if rng.random() < 0.2 else None
    return Rpc(method, messages, metadata, opens, timeout_s, leaves, is_proto)


def request_bytes(rng: random.Random, method: str) -> bytes:
    """A message of the method's own kind, right in some of its fields and wild in others."""
    service, _, name = method[1:].partition("/")
    if service not in SERVICES:  # as another version of reflection, which has the same messages
        service = next(known for known in SERVICES if known.endswith("ServerReflection"))
    message = _made(SERVICES[service].methods_by_name[name].input_type)
    if isinstance(message, pb.GenerateRequest):
        _begin(rng, message)
    if isinstance(message, pb.GenerateBatchRequest):
        for _ in range(rng.choice((0, 1, 3))):
            _begin(rng, message.requests.add())
    _fill(rng, message, rng.choice((0, 1, 2, 4)))
    payload = message.SerializeToString()
    if rng.random() < 0.1:
        payload += rng.choice((b"\x98\x06\x01", b"\xfa\x07\x03abc" * 50, payload))  # unknown fields; all of it again
    return payload


def _made(kind: Any) -> Message:
    return message_factory.GetMessageClass(kind)()


def _begin(rng: random.Random, request: pb.GenerateRequest) -> None:
    """A request that would be answered."""
    if rng.random() < 0.7:
        request.text = "Hello"
    else:
        request.token_ids.ids.extend([72, 101])
    request.sampling.max_tokens = rng.randint(1, 8)


def _fill(rng: random.Random, message: Message, most: int, depth: int = 0) -> None:
    """Some fields at random, at any depth."""
    fields = list(message.DESCRIPTOR.fields)
    for field in rng.sample(fields, min(most, len(fields))):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.choice((1, 5, 300))):
                getattr(message, field.name)[rng.randrange(2**32)] = rng.choice(NUMBERS)
        elif field.message_type is not None and depth < 3:
            inner = getattr(message, field.name)
            each = inner.add() if field.is_repeated else inner
            each.SetInParent()
            _fill(rng, each, rng.choice((1, 3)), depth + 1)
        elif field.message_type is None and field.is_repeated:
            count = rng.choice((1, 3, MOST_REPEATED))
            getattr(message, field.name).extend(_value(rng, field) for _ in range(count))
        elif field.message_type is None:
            setattr(message, field.name, _value(rng, field))


def _value(rng: random.Random, field: Any) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice(NUMBERS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((b"", b"\x89PNG\r\n\x1a\n", rng.randbytes(200)))
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(TEXTS)
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice(WHOLE_NUMBERS) % 2**32
        case FieldDescriptor.CPPTYPE_UINT64:
            return rng.choice(WHOLE_NUMBERS) % 2**64
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice(WHOLE_NUMBERS)
        case _:
            return max(-(2**31), min(2**31 - 1, rng.choice(WHOLE_NUMBERS)))


def _metadata(
    rng: random.Random, keys: Mapping[str, str], admin_key: str, level: Level
) -> tuple[list[tuple[str, Any]], bool | None]:
    """Headers, and whether they open a door of that level."""
    good = rng.choice(list(keys.values()))
    odd = rng.choice(_odd_metadata(rng)) if rng.random() < 0.2 else []
    if rng.random() < 0.8:
        return [("authorization", f"Bearer {good}"), *odd], True
    given, opens = rng.choice(
        (
            ([], False), ([""], False), (["Bearer"], False), ([good], False), ([f"Basic {good}"], False),
            ([f"Bearer {good}x"], False), ([f"Bearer {admin_key}"], level is Level.FIGURES),
            ([f"Bearer {good}", "Bearer x"], None),
        )
    )  # fmt: skip
    opened = True if level is Level.OPEN else opens
    return [*(("authorization", each) for each in given), *odd], opened


def _odd_metadata(rng: random.Random) -> list[list[tuple[str, Any]]]:
    trace = f"00-{rng.randbytes(16).hex()}-{rng.randbytes(8).hex()}-01"
    return [
        [("traceparent", "x" * 100)],
        [("traceparent", trace)],
        [("x-bin", rng.randbytes(100))],
        [("x", "y" * 5000)],
        [("grpc-status", "0")],
        [("x", "1")] * 40,
    ]
