"""Mistakes that people make, and what they are told: one sentence that says what was asked, what there is, what to do.

The mistakes of the command line are made one after another in a process of its own, so that it can be seen that none of
them loads torch or Ray; a few are made as a shell does, too.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.other_flags import OTHER_FLAGS
from intarsia.proto.reply import Delta
from intarsia.tests.deploy.scripted import ScriptedEngine

SAFETY_S = 120

COMMANDS: dict[str, tuple[str, ...]] = {
    # -- which model -------------------------------------------------------------------------------------------------
    "serve": ("MODEL_DIR", "intarsia serve --help"),
    "serve dmo": ("no model directory at dmo", "Did you mean demo?"),
    "serve google/gemma-3-1b-it": ("google/gemma-3-1b-it", "hf download google/gemma-3-1b-it"),
    "serve gemma-3-27b-it": ("no model directory at gemma-3-27b-it", "hf download google/gemma-3-27b-it"),
    "serve half/loaded": ("lacks model.safetensors", "not completed", "hf download half/loaded"),
    "serve {tmp}/nowhere": ("{tmp}/nowhere", "config.json and safetensors files"),
    "serve {tmp}/empty": ("{tmp}/empty", "no config.json"),
    "serve {tmp}/demo/config.json": ("no model directory at {tmp}/demo/config.json", "a folder with config.json"),
    "serve {tmp}/no-weights": ("lacks the weights model.safetensors", "no weight files"),
    "serve {tmp}/cut-weights": ("model.safetensors", "bytes"),
    "serve {tmp}/bad-json": ("config.json", "not readable JSON"),
    "serve {tmp}/no-type": ("no model_type",),
    "serve {tmp}/exl3": ("quantised weights that are not read: its method is exl3", "fp8", "bfloat16"),
    "serve {tmp}/bad-tokenizer": ("the tokenizer in {tmp}/bad-tokenizer cannot be read",),
    "serve demo --tokenizer {tmp}/empty": ("{tmp}/empty", "tokenizer.json"),
    "serve demo --tokenizer some/where": ("some/where", "hf download some/where"),
    "serve demo --chat-template {tmp}/nowhere": ("chat_template", "{tmp}/nowhere", "No such file"),
    "serve demo --chat-template {tmp}/broken.jinja": ("broken.jinja", "no Jinja template", "line 1"),
    # -- how it is split, how long, how large ------------------------------------------------------------------------
    "serve demo -tp 64": ("tensor_parallel_size 64", "4 query heads", "2 key-value heads"),
    "serve demo --tensor-parallel-size 3": ("tensor_parallel_size 3", "4 query heads", "divides"),
    "serve demo -tp 0": ("tensor_parallel_size must be at least 1, got 0",),
    "serve demo -tp two": ("-tp", "integer", "--help"),
    "serve demo --max-model-len 999999": ("999999 tokens", "positions", "Lower max_model_len"),
    "serve demo --max-model-len 9m": ("9000000 tokens", "Lower max_model_len"),
    "serve demo --max-model-len 32x": ("max_model_len", "'32x'", "32k is 32,000"),
    "serve demo --max-model-len 1": ("max_model_len", "(2), got 1"),
    "serve demo --kv-cache-memory 900GiB": ("900 GiB", "memory free", "Lower kv_cache_memory"),
    "serve demo -tp 2 --kv-cache-memory 500GiB": ("1000 GiB", "500 GiB on each of 2 workers"),
    "serve demo --kv-cache-memory 1KiB": ("kv_cache_memory of 1024 bytes", "Give more memory"),
    "serve demo --kv-cache-memory plenty": ("kv_cache_memory", "GiB", "'plenty'"),
    "serve demo --kv-cache-memory 4XB": ("kv_cache_memory", "'4XB'"),
    "serve demo --swap-space much": ("swap_space", "'much'"),
    "serve demo --block-size 0": ("block_size must be at least 1",),
    "serve demo --max-num-seqs 0": ("max_num_seqs", "0"),
    "serve demo --max-num-batched-tokens 0": ("max_num_batched_tokens", "0"),
    "serve demo --gpu-memory-utilization 1.5": ("gpu_memory_utilization", "at most 1", "1.5"),
    "serve demo --attention-backend flashinfer": ("no attention backend 'flashinfer'", "native", "torch"),
    "serve demo --attention-backend triton": ("triton runs on a GPU", "native"),
    "serve demo --dtype int4": ("dtype must be one of", "bfloat16", "'int4'"),
    "serve demo --strategy best": ("strategy must be one of", "packed", "'best'"),
    "serve demo --disable-hybrid-kv-cache-manager --strategy packed": ("strategy packed is given", "leave one out"),
    "serve demo --enforce-eager --torch-compile": ("enforce_eager", "torch_compile", "leave one of them out"),
    "serve demo --generation-config none.json": ("generation_config", '"none"'),
    "serve demo --cpu-threads 0": ("cpu_threads must be at least 1",),
    "serve demo --prefill-share 2": ("prefill_share", "2"),
    "serve demo --expected-average-seq-len long": ("expected_average_seq_len", "'long'"),
    "serve demo --otlp-traces-endpoint here": ("otlp_traces_endpoint", "http://HOST:4318/v1/traces", "'here'"),
    # -- where it listens, and to whom -------------------------------------------------------------------------------
    "serve demo --port {busy}": ("127.0.0.1:{busy}", "in use", "--port", "0 for a free one"),
    "serve demo --port 0 --grpc-port {busy}": ("127.0.0.1:{busy}", "in use", "--grpc-port"),
    "serve demo --port 8123 --grpc-port 8123": ("port and grpc_port are both 8123",),
    "serve demo --port 70000": ("--port", "65535", "got '70000'"),
    "serve demo --host 0.0.0.0": ("other machines could reach host '0.0.0.0'", "--api-key-file", "--insecure"),
    "serve demo --host nowhere.invalid --insecure": ("nowhere.invalid", "no address of this machine"),
    "serve demo --api-key-file {tmp}/nowhere": ("api_key_file", "{tmp}/nowhere"),
    "serve demo --ssl-certfile {tmp}/cert.pem": ("ssl_keyfile is missing",),
    "serve demo --root-path llm": ("root_path must begin with a slash", "'llm'"),
    "serve demo --max-streams 0": ("max_streams must be at least 1",),
    "serve demo --stream-interval-s 99": ("stream_interval_s", "99"),
    "serve demo --max-body-bytes 0": ("max_body_bytes", "0"),
    "serve demo --drain-timeout-s -1": ("drain_timeout_s", "-1"),
    "RAY_ADDRESS=127.0.0.1:{closed} serve demo": ("127.0.0.1:{closed}", "no Ray cluster answers", "ray start --head"),
    "RAY_ADDRESS=127.0.0.1:{busy} serve demo": ("127.0.0.1:{busy}", "no Ray cluster answers", "unset RAY_ADDRESS"),
    "RAY_ADDRESS=http://127.0.0.1:8265 serve demo": ("RAY_ADDRESS must be HOST:PORT", "8265"),
    "RAY_AUTH_MODE=disabled serve demo": ("RAY_AUTH_MODE=disabled", "Unset it", "--insecure-ray"),
    "INTARSIA_BLOCK_SIZE=many serve demo": ("--block-size", "integer", "got 'many'"),
    # -- flags and files ---------------------------------------------------------------------------------------------
    "serve demo --config {tmp}/nowhere": ("{tmp}/nowhere cannot be read",),
    "serve demo --config {tmp}/unknown.yaml": ("sets max_num_seq,", "Did you mean max_num_seqs?"),
    "serve demo --seed 3": ("no --seed", "each request says it for itself"),
    "serve demo --enable-lora": ("no --enable-lora", "merge them"),
    "serve demo --quantization fp8": ("no --quantization", "checkpoint"),
    "serve --model demo": ("no --model", "intarsia serve MODEL_DIR"),
    "serve demo --tool-call-parser herpes": ("tool_call_parser: herpes is not known", "hermes", "none"),
    "serve demo --enable-auto-tool-choice": ("no --enable-auto-tool-choice", "leave it out"),
    "serve demo -pp 2": ("no -pp", "--tensor-parallel-size"),
    "serve demo --ctx-size 4096": ("no --ctx-size", "--max-model-len"),
    "serve demo --max-model-length 32": ("no --max-model-length", "Did you mean --max-model-len?"),
    "serve demo --colour red": ("no --colour", "intarsia serve --help"),
    "serve demo again": ("again", "intarsia serve --help"),
    "sevre demo": ("sevre", "serve"),
    # -- other commands ----------------------------------------------------------------------------------------------
    "batch {tmp}/nowhere -o {tmp}/out --model demo": ("the batch {tmp}/nowhere cannot be read",),
    "batch {tmp}/in.jsonl -o {tmp}/in.jsonl --model demo": ("is the batch itself", "choose another --out"),
    "batch {tmp}/in.jsonl --model demo": ("--out", "intarsia batch --help"),
    "batch {tmp}/in.jsonl -o {tmp}/out --model dmo": ("Did you mean demo?",),
    "batch {tmp}/in.jsonl -o {tmp}/out --model demo -tp 3": ("tensor_parallel_size 3", "4 query heads"),
    "batch {tmp}/in.jsonl -o {tmp}/out --model demo --num-engines 0": ("num_engines must be at least 1",),
    "batch {tmp}/in.jsonl -o {tmp}/out --model demo --seed 1": ("no --seed", "each request"),
    "batch {tmp}/in.jsonl -o {tmp}/out --model demo": ("gpt-4o-mini", "--served-model-name gpt-4o-mini"),
    "generate": ("either a PROMPT or --token-ids",),
    "generate hi --token-ids 1": ("either a PROMPT or --token-ids",),
    "generate --token-ids one,two": ("--token-ids", "'one,two'"),
    "generate hi --temperature hot": ("--temperature", "number"),
    "generate hi --temperature -1": ("temperature", "-1"),
    "generate hi --max-tokens 0": ("max_tokens", "0"),
    "generate hi --address 127.0.0.1:{closed}": ("no server answers at 127.0.0.1:{closed}", "intarsia serve"),
    "generate hi --image {tmp}/nowhere --address 127.0.0.1:{closed}": ("127.0.0.1:{closed}",),
    "generate hi --ssl-ca-certs {tmp}/nowhere": ("{tmp}/nowhere cannot be read",),
    "plan nowhere-at-all": ("nowhere-at-all",),
    "plan gemma-3-27b --kv-memory lots": ("kv_memory", "'lots'"),
    "plan gemma-3-27b --context long": ("context", "'long'"),
    "plan gemma-3-27b --tensor-parallel-size 0": ("tensor_parallel_size must be at least 1",),
    "replay {tmp}/nowhere": ("{tmp}/nowhere",),
    "top --json": ("--json is for --once",),
    "top --once --url nonsense": ("'nonsense' is no URL", "http://HOST:PORT"),
    "top --once --url http://127.0.0.1:{closed}": ("http://127.0.0.1:{closed}", "refused"),
}
"""Variables and arguments -> words of the answer."""

CHILD = """
import json, os, sys
from typer.testing import CliRunner
from intarsia.deploy.cli import app
for words, variables in json.load(sys.stdin):
    done = CliRunner().invoke(app, words, env=variables)
    heavy = [name for name in ("torch", "ray", "transformers") if name in sys.modules]
    raised = repr(done.exception) if done.exception and not isinstance(done.exception, SystemExit) else None
    print(json.dumps([done.exit_code, done.stdout, done.stderr, raised, heavy]), flush=True)
"""


class Told(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str
    raised: str | None
    heavy: list[str]  # what was loaded by then


class World(NamedTuple):
    """What the mistakes are about."""

    tmp: Path
    busy: int  # a port
    closed: int  # another, where no server listens

    def fill(self, text: str) -> str:
        return text.format(**self._asdict())

    def arguments(self, command: str) -> tuple[list[str], dict[str, str]]:
        words = self.fill(command).split()
        variables = dict(word.split("=", 1) for word in words if word.split("=")[0].isupper() and "=" in word)
        return [word for word in words if word.split("=")[0] not in variables], variables

    def environment(self) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("INTARSIA_", "RAY_", "HF_"))}
        free = {"INTARSIA_PORT": "0", "INTARSIA_GRPC_PORT": "0"}  # others may have the usual ones
        places = {"HF_HOME": str(self.tmp / "hub-home"), "XDG_RUNTIME_DIR": str(self.tmp)}
        return mine | free | places | {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    tmp = tmp_path_factory.mktemp("mistakes")
    _make_models(tmp)
    (tmp / "empty").mkdir()
    (tmp / "broken.jinja").write_text("{% for x in %}")
    (tmp / "unknown.yaml").write_text("max_num_seq: 3")
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "gpt-4o-mini", "prompt": "x"},
    }
    (tmp / "in.jsonl").write_text(json.dumps(line) + "\n")
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
        other.close()
        threading.Thread(target=_hang_up, args=(busy,), daemon=True).start()
        yield World(tmp, busy.getsockname()[1], closed)


def _hang_up(server: socket.socket) -> None:
    """On everybody, as a server of something else may."""
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def _make_models(tmp: Path) -> None:
    def copy(name: str, **config: Any) -> Path:
        folder = Path(shutil.copytree(DEMO_MODEL_DIR, tmp / name))
        fields = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
        return folder

    copy("demo")
    (copy("no-weights") / "model.safetensors").unlink()
    cut = copy("cut-weights") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:100_000])
    (copy("bad-json") / "config.json").write_text("{")
    copy("no-type", model_type=None)
    copy("exl3", quantization_config={"quant_method": "exl3"})
    (copy("bad-tokenizer") / "tokenizer.json").write_text('{"version": "1.0"}')
    hub = tmp / "hub-home" / "hub" / "models--half--loaded"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    shutil.copytree(tmp / "no-weights", hub / "snapshots" / "abc")


@pytest.fixture(scope="module")
def told(world: World) -> dict[str, Told]:
    """The answers to all commands."""
    asked = json.dumps([world.arguments(command) for command in COMMANDS])
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=asked,
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
        env=world.environment(),
        cwd=world.tmp,
        check=False,
    )
    answers = [Told(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(answers) == len(COMMANDS), done.stderr[-2000:]
    return dict(zip(COMMANDS, answers, strict=True))


def assert_one_sentence(stderr: str, world: World, words: tuple[str, ...]) -> None:
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    for word in words:
        assert world.fill(word) in stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_mistake_of_the_command_line_is_one_sentence_before_torch_and_ray(command: str, told: Any, world: World):
    answer = told[command]
    assert (answer.exit_code, answer.raised, answer.stdout) == (2, None, "")
    assert_one_sentence(answer.stderr, world, COMMANDS[command])
    assert answer.heavy == []


@pytest.mark.parametrize(
    "command", ["serve dmo", "serve demo -tp 64", "serve demo --port {busy}", "serve demo --seed 3"]
)
def test_mistake_in_a_shell_is_one_sentence(command: str, world: World):
    words, variables = world.arguments(command)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("intarsia")), *words],
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
        env=world.environment() | variables,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_sentence(done.stderr, world, COMMANDS[command])


def test_other_servers_flags_are_none_of_ours(told: Any):
    from typer.main import get_command

    from intarsia.deploy.cli import app

    commands: Any = get_command(app)
    for name in ("serve", "batch"):
        ours = {flag for param in commands.commands[name].params for flag in (*param.opts, *param.secondary_opts)}
        assert not ours & OTHER_FLAGS.keys() - {"--model"}  # which batch has


# -- over HTTP ---------------------------------------------------------------------------------------------------------

KEY = "right"
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"

REQUESTS: list[tuple[str, Any, int, tuple[str, ...]]] = [
    (COMPLETIONS, "{", 400, ("JSON",)),
    (COMPLETIONS, "", 400, ("no body", "JSON")),
    (COMPLETIONS, [], 400, ("object",)),
    (COMPLETIONS, {}, 400, ("prompt",)),
    (COMPLETIONS, {"prompt": "hi", "model": "gpt-4"}, 404, ("gpt-4", "tiny-hybrid")),
    (COMPLETIONS, {"prompt": [1], "temperature": "hot"}, 400, ("temperature", "number")),
    (COMPLETIONS, {"prompt": [1], "temperature": 9e9}, 400, ("temperature",)),
    (COMPLETIONS, {"prompt": [1], "max_tokens": -1}, 400, ("max_tokens",)),
    (COMPLETIONS, {"prompt": [1], "max_token": 3}, 400, ("max_token", "Did you mean max_tokens?")),
    (COMPLETIONS, {"prompt": [1], "top_p": 2}, 400, ("top_p",)),
    (COMPLETIONS, {"prompt": [1], "n": 0}, 400, ("n",)),
    (COMPLETIONS, {"prompt": {}}, 400, ("prompt",)),
    (COMPLETIONS, {"prompt": [1] * 2000}, 400, ("2000", "maximum context length is 1000 tokens")),
    (COMPLETIONS, {"prompt": [1], "suffix": "x"}, 400, ("suffix", "not supported")),
    (COMPLETIONS, {"prompt": [1], "stream_options": {"include_usage": True}}, 400, ("stream_options",)),
    (CHAT, {"messages": []}, 400, ("messages",)),
    (CHAT, {"messages": "hi"}, 400, ("messages", "list")),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, ("robot", "Supported values are: 'system'")),
    (CHAT, {"messages": HI}, 400, ("tokenizer",)),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, ("tools",)),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, ("tool",)),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, 400, ("xml", "Supported values are: 'text'")),
    ("POST /v1/embeddings", {"input": "x"}, 404, ("/v1/embeddings",)),
    ("GET /v1/completions", None, 405, ("POST",)),
    ("GET /v1/models/gpt-4", None, 404, ("gpt-4",)),
]
"""Line, body, status, words of the message."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> HttpServer:
        engine: Any = ScriptedEngine([Delta((7,), None, "length", 0)])
        front_end, access = FrontEnd(engine, None), Access(AccessSettings(api_key=(KEY,)))
        server = HttpServer(make_app(lambda: front_end, access), access)
        urls.append(await server.start(port=0))
        return server

    urls: list[str] = []
    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield urls[0]
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def ask(site: str, line: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    method, path = line.split()
    content = body if isinstance(body, str) or body is None else json.dumps(body)
    return httpx.request(method, f"{site}{path}", content=content, headers=headers, timeout=SAFETY_S)


def message_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and "\n" not in error["message"]
    return error["message"]


@pytest.mark.parametrize(("line", "body", "status", "words"), REQUESTS)
def test_mistake_over_http_is_one_sentence(site: str, line: str, body: Any, status: int, words: tuple[str, ...]):
    answer = ask(site, line, body, {**JSON, "Authorization": f"Bearer {KEY}"})
    assert answer.status_code == status
    message = message_of(answer)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        (JSON, 401, ("key", "Authorization: Bearer KEY")),
        ({**JSON, "Authorization": "Bearer wrong"}, 401, ("key is not known",)),
        ({**JSON, "Authorization": "Basic eDp5"}, 401, ("Authorization: Bearer KEY",)),
        ({"Content-Type": "text/plain", "Authorization": f"Bearer {KEY}"}, 400, ("Content-Type: application/json",)),
        (
            {"Content-Type": "application/x-www-form-urlencoded", "Authorization": f"Bearer {KEY}"},
            400,
            ("Content-Type: application/json",),
        ),
    ],
)
def test_mistake_in_a_header_is_one_sentence(site: str, headers: dict[str, str], status: int, words: tuple[str, ...]):
    answer = ask(site, COMPLETIONS, {"prompt": [1]}, headers)
    assert answer.status_code == status
    message = message_of(answer)
    for word in words:
        assert word in message
