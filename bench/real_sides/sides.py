"""What is measured offline beside each other: each side is a process that does a round when it is told to."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .models import Model

HERE = Path(__file__).resolve().parent
END_WITHIN_S = 60.0


class Side:
    """A process that is `start`ed, does rounds of `work`, and is `end`ed. `skipped` says why there is none."""

    def __init__(self, name: str, command: list[str] | None, skipped: str = ""):
        self.name, self.skipped, self._command = name, skipped, command
        self._process: subprocess.Popen[str] | None = None
        self.token_bytes: dict[int, int] = {}  # by number of streams

    def start(self) -> bool:
        """Whether it runs; if not, `skipped` says why."""
        if self._command is None:
            return False
        # With the threading defaults it comes with.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  for as long as it runs
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment, cwd="/",
        )  # fmt: skip
        if self._answer() is None:
            self._process.wait(END_WITHIN_S)
            self._errors.seek(0)
            said = [line for line in self._errors.read().splitlines() if line.strip()] or ["nothing"]
            print(f"-- {self.name} --", *said[-40:], sep="\n", file=sys.stderr)
            self.skipped = f"it ended with {self._process.returncode} while it started; its last words: {said[-1]}"
            return False
        return True

    def work(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """When each stream's tokens came, in seconds."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer is None:
            self._errors.seek(0)
            sys.exit(f"{self.name} ended early:\n{self._errors.read()[-3000:]}")
        times = answer["times"]
        assert [len(each) for each in times] == [new_tokens] * len(prompts), f"{self.name} gave other tokens"
        return times

    def end(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        return None


def all_sides(model: Model, args: argparse.Namespace) -> list[Side]:
    peer = "" if model.is_real or not model.name.endswith("-shape") else "shapes are measured for the engines of ours"
    return [
        _python("ours", sys.executable, "ours", model, args),
        _other(model, args),
        Side("transformers", None, peer) if peer else _python("transformers", sys.executable, "transformers", model, args),
        _vllm(model, args, peer),
        _llama_cpp(model, args, peer),
    ]  # fmt: skip


def _other(model: Model, args: argparse.Namespace) -> Side:
    if args.other is None:
        return Side("other", None, "no other checkout is named: --other")
    return _python("other", str(Path(args.other).resolve() / ".venv/bin/python"), "ours", model, args)


def _vllm(model: Model, args: argparse.Namespace, peer: str) -> Side:
    if args.vllm_python is None:
        peer = "no interpreter with vLLM is named: --vllm-python"
    return Side("vllm", None, peer) if peer else _python("vllm", args.vllm_python, "vllm", model, args)


def _llama_cpp(model: Model, args: argparse.Namespace, peer: str) -> Side:
    node, file = shutil.which("node"), model.gguf()
    if args.llama_cpp is None:
        peer = "no folder with node-llama-cpp is named: --llama-cpp"
    elif node is None:
        peer = "there is no node, and llama.cpp is driven by node-llama-cpp"
    elif file is None:
        peer = peer or f"{model.name} comes in no GGUF file"
    if peer or node is None:
        return Side("llama.cpp", None, peer)
    sizes = (str(args.threads), str(max(args.streams)), str(_max_tokens(args)))
    folder = str(Path(args.llama_cpp).resolve())
    return Side("llama.cpp", [node, str(HERE / "llama_cpp.mjs"), folder, str(file), *sizes])


def _python(name: str, python: str, kind: str, model: Model, args: argparse.Namespace) -> Side:
    options = {
        "model": str(model.folder), "dtype": args.dtype, "threads": args.threads, "streams": max(args.streams),
        "max_tokens": _max_tokens(args), "eager": args.vllm_eager,
    }  # fmt: skip
    if shutil.which(python) is None:
        return Side(name, None, f"there is no interpreter at {python}")
    return Side(name, [python, "-P", str(HERE / "children.py"), kind, json.dumps(options)])


def _max_tokens(args: argparse.Namespace) -> int:
    """Of a stream, with some to spare."""
    return args.prompt_tokens + args.new_tokens + 16
