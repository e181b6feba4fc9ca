"""What a server speaks, for clients without proto files: `grpc.reflection.v1`, and v1alpha for older ones.

The two are alike but for their names, and grpcio brings only the older.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

ALPHA, V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"

SERVICE_NAMES = tuple(f"{package}.ServerReflection" for package in (V1, ALPHA))


def add_reflection(services: Sequence[str], server: Any) -> None:
    """Tell of these services, and of reflection itself."""
    _know_v1()
    servicer: Any = reflection.aio.ReflectionServicer((*services, *SERVICE_NAMES))
    for name in SERVICE_NAMES:
        method = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})])


def _know_v1() -> None:
    """Describe the newer one, which is asked for as everything else is."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(f"{V1}.ServerReflection")
    except KeyError:
        pool.AddSerializedFile(_described_as_v1().SerializeToString())


def _described_as_v1() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = V1
    for message in file.message_type:
        for field in (each for each in message.field if each.type_name):
            field.type_name = field.type_name.replace(f".{ALPHA}.", f".{V1}.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{ALPHA}.", f".{V1}.")
            method.output_type = method.output_type.replace(f".{ALPHA}.", f".{V1}.")
    return file
