"""Command-line clients that have no proto files: they ask the server what it speaks."""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from intarsia.proto.reply import Delta

BUF = Path(__file__).parents[3] / ".venv" / "npm" / "node_modules" / ".bin" / "buf"
SCRIPT = (Delta((5,)), Delta((6,), finish_reason="length"))
METHOD = "intarsia.v1.Inference/Generate"
ASKED = '{"token_ids": {"ids": [1, 2, 3]}}'

Ask = Callable[[str, Sequence[str]], str]


def grpcurl(address: str, arguments: Sequence[str]) -> str:
    """arguments: `list`, or a method and its message"""
    data = ["-d", arguments[1]] if len(arguments) > 1 else []
    command = ["grpcurl", "-plaintext", *data, address, arguments[0]]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def buf_curl(address: str, arguments: Sequence[str]) -> str:
    if arguments[0] == "list":
        rest = [f"http://{address}", "--list-services"]
    else:
        rest = [f"http://{address}/{arguments[0]}", "-d", arguments[1]]
    command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *rest]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


CLIENTS = [
    pytest.param(
        grpcurl, marks=pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed here")
    ),
    pytest.param(buf_curl, marks=pytest.mark.skipif(not BUF.exists(), reason=".ci/run installs buf")),
]


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_client_without_proto_files_lists_and_calls(ask: Ask, serve_script: Callable):
    _, address = serve_script(*SCRIPT)
    assert "intarsia.v1.Inference" in ask(address, ["list"])
    decoder, text, answers = json.JSONDecoder(), ask(address, [METHOD, ASKED]).strip(), []
    while text:
        answer, length = decoder.raw_decode(text)
        answers.append(answer)
        text = text[length:].strip()
    assert [answer["tokenIds"] for answer in answers] == [[5], [6]]
    assert answers[-1]["finishReason"] == "FINISH_REASON_LENGTH"
