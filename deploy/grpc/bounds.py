"""What a gRPC server lets in, by our limits: what gRPC itself looks after, and how much a message may hold."""

from collections.abc import Mapping

from ...proto import inference_pb2 as pb
from ...proto.status import EngineInfo
from ..settings.limits import Limits
from .convert import (
    MOST_BAD,
    MOST_OF_ROW,
    most_batch_requests,
    most_counted_tokens,
    most_prompt_tokens,
    most_stop_tokens,
)
from .wire import Bounds

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


def options_of(limits: Limits) -> tuple[tuple[str, int], ...]:
    """What gRPC itself limits. Each was tried with real sockets (tests/deploy/grpc/test_limits.py)."""
    return (
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", limits.max_head_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_head_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(limits.head_timeout_s)),  # until HTTP/2 is spoken, TLS included
        ("grpc.max_connection_idle_ms", _ms(limits.idle_timeout_s)),  # without a call
        ("grpc.keepalive_time_ms", _ms(limits.idle_timeout_s)),  # is a client still there that has one?
        ("grpc.keepalive_timeout_ms", _ms(limits.head_timeout_s)),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
    )


def _ms(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), 2**31 - 1)


def bounds_of(limits: Limits, info: EngineInfo) -> Mapping[str, Bounds]:
    """Of messages, by method. The requests of a batch are judged one by one, when it is parsed."""
    fields = max(limits.max_json_items, info.max_model_len)
    lists = f"{pb.SamplingParams.DESCRIPTOR.full_name}.stop_token_ids", f"{pb.TokenIds.DESCRIPTOR.full_name}.ids"
    most = {
        "Generate": {
            lists[0]: most_stop_tokens(limits),
            lists[1]: most_prompt_tokens(info),
            f"{pb.SamplingParams.DESCRIPTOR.full_name}.bad_token_ids": MOST_BAD,
            f"{pb.TokenRow.DESCRIPTOR.full_name}.ids": MOST_OF_ROW,
        },
        "GenerateBatch": {f"{pb.GenerateBatchRequest.DESCRIPTOR.full_name}.requests": most_batch_requests(limits)},
        "Probe": {lists[1]: most_prompt_tokens(info)},
        "Detokenize": {lists[1]: most_counted_tokens(limits, info)},
    }
    return {f"/{SERVICE}/{method}": Bounds(fields, lists) for method, lists in most.items()}
