"""A real gRPC server on loopback in front of a scripted engine, and a tokenizer made on the spot."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.tests.deploy.scripted import ScriptedEngine
from intarsia.tests.hub import Hub, HubServer


@pytest.fixture
def serve_script(loop: Any) -> Iterator[Callable[..., tuple[ScriptedEngine, str]]]:
    """Starts a server that plays a script; returns its engine and its address."""
    servers: list[GrpcServer] = []

    def start(*script: Any, tokenizer: Any = None) -> tuple[ScriptedEngine, str]:
        engine: Any = ScriptedEngine(script)

        async def listen() -> str:
            engine.server = GrpcServer(FrontEnd(engine, tokenizer))
            servers.append(engine.server)
            return await engine.server.start(port=0)

        return engine, loop.run(listen())

    yield start
    for server in servers:
        loop.run(server.stop(grace_s=0))


@pytest.fixture(scope="session")
def byte_backend() -> Backend:
    """256 tokens of one byte each (id = place in the alphabet), `<eos>`, and the two bytes that begin many emoji."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)} | {"ðŁ": 256}
    backend = Backend(models.BPE(vocab=vocab, merges=[("ð", "Ł")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


@pytest.fixture(scope="session")
def byte_tokenizer(byte_backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte-tokenizer")
    byte_backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    loaded = Tokenizer.load(folder)
    assert loaded is not None
    return loaded


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where downloads from the Hub go; nothing else of the user's is seen."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    return tmp_path / "hub"


@pytest.fixture
def hub(hub_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on loopback."""
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
