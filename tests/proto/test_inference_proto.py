from pathlib import Path

import pytest

from intarsia.proto import generate, inference_pb2


def test_generated_code_is_what_the_proto_file_gives(tmp_path: Path):
    pytest.importorskip("grpc_tools")
    generate.generate(tmp_path)
    for name in generate.GENERATED:
        assert (tmp_path / name).read_text() == (generate.HERE / name).read_text(), f"run `make proto`: {name} is stale"


def test_descriptor_carries_our_path():
    """So that it never clashes with another library's `inference.proto` in the same process."""
    assert inference_pb2.DESCRIPTOR.name == "intarsia/proto/inference.proto"
    assert inference_pb2.DESCRIPTOR.package == "intarsia.v1"
