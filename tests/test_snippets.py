"""What the documentation tells people to type, typed.

    ```sh        commands; a line each, comments aside
    ```console   `$ command`, and lines that it prints
    ```python    a program
    ```          a picture or an output: nothing to run

A line `...` in an output stands for any lines; all others must come as they stand, in their order. What cannot be run
here has the reason in the line before: <!-- not run: it downloads 5 GB -->

Checkpoints, ports and sizes are those of this machine; all else is typed as it stands.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.tests.conftest import free_port

ROOT = Path(__file__).parents[1]
PAGES = sorted({page for place in ("*.md", "docs/*.md", "*/README.md", "*/*/README.md") for page in ROOT.glob(place)})
PROGRAMS = ("intarsia", "curl", "grpcurl", "serve", "ray", "make", "python", "pip", "apt-get")
TRACE = ROOT.parent / "shared" / "data" / "traces" / "mooncake_conversation.jsonl.gz"

RAY_FOLDER = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
"""Where programs look for a Ray that runs here: not where other tests have left one."""

ELSEWHERE = {
    "make demo": ".ci/run",
    "make wheel": "tests/test_release.py",
    "make test": ".ci/run",
    "make test-all": "by hand: it takes as long as all else",
    "make check": ".ci/run",
    "python -m intarsia.tests.pretended_cuda.run": "tests/workers/test_on_pretended_cuda.py, where Triton is installed",
    "python bench/gpu_battery.py": "by hand: it needs a GPU",
    "python -m intarsia.bench.gpu.cost_model": "tests/bench/test_gpu_cost_model.py, where Triton is installed",
    "serve deploy": "tests/deploy/test_serve_commands.py",
    "serve run": "tests/deploy/test_serve_commands.py",
    "export": "tests/deploy/test_serve_commands.py",
    "ray start": "tests/deploy/test_serve_commands.py",
    "ray get-auth-token": "tests/deploy/test_serve_commands.py",
    "ray status": "tests/deploy/test_serve_commands.py",
    "ray job submit": "tests/deploy/test_serve_commands.py",
    "grpcurl": "tests/deploy/grpc/test_reflection.py",
}
"""Commands that begin so, and what runs them."""


SLOW_PAGES = {"CONTRIBUTING.md", "docs/package.md", "docs/replay.md", "deploy/cluster/README.md"}
"""They say what other pages say, too, or what takes long: `make check`, whole traces."""

NOT_RUN = re.compile(r"<!-- not run: .{8,} -->\n\Z")


class Snippet(NamedTuple):
    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(*kinds: str) -> list[Snippet]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            is_run = not NOT_RUN.search(text[: match.start()])
            if match[1] in kinds and is_run:
                found.append(Snippet(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found


def as_parameters(*kinds: str) -> list[Any]:
    found = []
    for snippet in snippets(*kinds):
        is_slow = str(snippet.page.relative_to(ROOT)) in SLOW_PAGES
        found.append(pytest.param(snippet, id=str(snippet), marks=[pytest.mark.slow] if is_slow else []))
    return found


class Desk(NamedTuple):
    """Where snippets are typed: a folder with the files they name, and two servers."""

    folder: Path
    http_port: int
    grpc_port: int
    seeing_grpc_port: int  # of a model that takes images

    def here(self, text: str) -> str:
        """A snippet with what is different on this machine."""
        if "--image" in text:
            text += f" --address 127.0.0.1:{self.seeing_grpc_port}"
        for there, here in (
            ("path/to/checkpoint", str(DEMO_MODEL_DIR)),
            ("127.0.0.1:8000", f"127.0.0.1:{self.http_port}"),
            ("127.0.0.1:50051", f"127.0.0.1:{self.grpc_port}"),
            ("0.0.0.0", "127.0.0.1"),
            ("4GiB", "4MiB"),
            (TRACE.name, str(TRACE)),
        ):
            text = text.replace(there, here)
        if re.match(r"intarsia generate (?!.*--address)", text):
            text += f" --address 127.0.0.1:{self.grpc_port}"
        return text


def environment(folder: Path) -> dict[str, str]:
    """With a list of running servers of its own: other desks serve at the same time."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = folder / "run"
    run.mkdir(exist_ok=True)
    own = {"PATH": path, "RAY_TMPDIR": RAY_FOLDER, "XDG_RUNTIME_DIR": str(run)}
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own


def begin(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a server, and wait until it is ready."""
    server = subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout
    printed = []
    for line in server.stdout:
        printed.append(line)
        if line.startswith("ready"):
            return server
    raise AssertionError(f"{command} ended:\n{''.join(printed)}")


def end(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    assert server.returncode == 0


def seeing_model(folder: Path, made: Path) -> Path:
    """A tiny model that takes images, with a tokenizer of single characters."""
    from transformers import AutoConfig, PreTrainedTokenizerFast

    shutil.copytree(made, folder)
    image_token = AutoConfig.from_pretrained(folder).image_token_index
    characters = [chr(n) for n in range(32, 127)]
    ids = [n for n in range(len(characters) + 1) if n != image_token][: len(characters)]
    backend = Tokenizer(models.BPE(dict(zip(characters, ids, strict=True)) | {"<|image|>": image_token}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<|image|>"])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def desk(tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    (folder / "keys").write_text("oak\n")
    body = {"prompt": "A program that", "max_tokens": 12}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    authority = trustme.CA().issue_cert("127.0.0.1")
    authority.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    authority.private_key_pem.write_to_path(str(folder / "key.pem"))
    Image.new("RGB", (40, 30), "peru").save(folder / "panel.jpg")
    seeing = seeing_model(folder / "seeing", tiny("mllama").path)
    ports = [free_port() for _ in range(4)]
    with ThreadPoolExecutor(2) as pool:
        servers = list(
            pool.map(
                lambda model, http, grpc: begin(f"intarsia serve {model} --port {http} --grpc-port {grpc}", folder),
                (DEMO_MODEL_DIR, seeing),
                ports[::2],
                ports[1::2],
            )
        )
    yield Desk(folder, ports[0], ports[1], ports[3])
    for server in servers:
        end(server)


def commands(snippet: Snippet) -> list[tuple[str, list[str]]]:
    """Each command with the lines that it is said to print."""
    found: list[tuple[str, list[str]]] = []
    for line in snippet.text.replace("\\\n", " ").splitlines():
        if snippet.kind == "sh":
            found += [(shlex.join(words), [])] if (words := shlex.split(line, comments=True)) else []
        elif line.startswith("$ "):
            found.append((shlex.join(shlex.split(line[2:])), []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize("snippet", as_parameters("sh", "console"))
def test_commands_do_and_print_what_is_said(snippet: Snippet, desk: Desk):
    for command, said in commands(snippet):
        if command.startswith(tuple(ELSEWHERE)):
            continue
        if TRACE.name in command and not TRACE.exists():
            pytest.skip("published traces are not part of the repository")
        typed = desk.here(command)
        if command == "intarsia serve path/to/checkpoint":
            continue  # the desk's own server
        if typed.startswith("intarsia serve"):
            end(begin(f"{typed} --port 0 --grpc-port 0", desk.folder))
            continue
        done = subprocess.run(
            shlex.split(typed),
            cwd=desk.folder,
            env=environment(desk.folder),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{typed}\n{done.stdout}\n{done.stderr}"
        assert '"error"' not in done.stdout or said, f"{typed}\n{done.stdout}"
        if said:
            assert is_output(said, done.stdout.splitlines()), f"{typed} prints another thing:\n{done.stdout}"


def is_output(said: list[str], printed: list[str]) -> bool:
    """Whether all that is printed is said, and nothing else; `...` is any lines. Blanks at the ends do not count."""
    parts = [".*" if line.strip() == "..." else re.escape(line.rstrip()) + "\n" for line in said]
    text = "".join(f"{line.rstrip()}\n" for line in printed)
    return re.fullmatch("".join(parts).strip("\n") + r"\s*", text, re.DOTALL) is not None


def test_an_output_with_a_line_too_few_is_another_one():
    printed = ["found  21 %", "lost   3 tokens", "end"]
    assert is_output(printed, printed) and is_output(["...", "lost   3 tokens", "..."], printed)
    assert is_output(["found  21 %", "..."], printed)
    assert not is_output(printed[:2], printed) and not is_output(["...", "lost   4 tokens", "..."], printed)
    assert not is_output(["...", "end", "lost   3 tokens", "..."], printed)


@pytest.mark.parametrize("snippet", as_parameters("python"))
def test_programs_run(snippet: Snippet, desk: Desk):
    program = desk.here(snippet.text)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=desk.folder,
        env=environment(desk.folder),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{program}\n{done.stderr}"
    assert done.stdout  # a line at least: an answer that was drawn may be empty


def test_every_command_of_the_documentation_is_marked_as_one():
    unmarked = [
        f"{snippet}: {line}"
        for snippet in snippets("")
        for line in snippet.text.splitlines()
        if line.removeprefix("$ ").startswith(tuple(f"{program} " for program in PROGRAMS))
    ]
    assert not unmarked
    for place in ELSEWHERE.values():
        assert not place.endswith(".py") or (ROOT / place).exists(), place


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_shows(tmp_path: Path):
    [shown] = re.findall(
        r"`MODEL=tiny make demo` prints:\n\n```\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    command = [str(Path(sys.executable).with_name("intarsia")), "demo"]
    wide = environment(tmp_path) | {"COLUMNS": "200", "MODEL": "tiny"}
    done = subprocess.run(command, env=wide, capture_output=True, text=True, timeout=300, check=True)
    printed = {without_numbers(line) for line in done.stdout.splitlines()}
    for line in shown.splitlines():
        assert line.startswith("...") or without_numbers(line) in printed, f"{line!r} is not printed:\n{done.stdout}"


def without_numbers(line: str) -> str:
    """Times, ports, sizes and drawn keys differ; words do not."""
    return " ".join(re.sub(r"\d[\d.,]*", "0", re.sub(r"key=\S+", "key=...", line)).split())
