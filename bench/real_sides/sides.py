"""What is measured offline beside each other: each side is a process that does a round when it is told to."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .models import Model

HERE = Path(__file__).resolve().parent
END_WITHIN_S = 60.0
NO_VLLM = "no interpreter with vLLM is named: --vllm-python"
NO_GGUF = "there is no GGUF file"


def environment() -> dict[str, str]:
    """Ours, with the threading defaults that each side comes with."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}


class Side:
    """A process that is `start`ed, does rounds of `work`, and is `end`ed. `skipped` says why there is none.

    Between its rounds it is stopped, with all that it started: threads that wait for work spin, and would take a core
    from the side whose turn it is."""

    def __init__(self, name: str, command: list[str] | None, skipped: str = ""):
        self.name, self.skipped, self._command = name, skipped, command
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> bool:
        """Whether it runs; if not, `skipped` says why."""
        if self._command is None:
            return False
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  for as long as it runs
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment(), cwd="/", start_new_session=True,
        )  # fmt: skip
        if self._answer() is None:
            self._process.wait(END_WITHIN_S)
            self._errors.seek(0)
            said = [line for line in self._errors.read().splitlines() if line.strip()] or ["nothing"]
            print(f"-- {self.name} --", *said[-40:], sep="\n", file=sys.stderr)
            self.skipped = f"it ended with {self._process.returncode} while it started; its last words: {said[-1]}"
            return False
        self._signal(signal.SIGSTOP)
        return True

    def work(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """When each stream's tokens came, in seconds."""
        assert self._process is not None and self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer is None:
            self._errors.seek(0)
            sys.exit(f"{self.name} ended early:\n{self._errors.read()[-3000:]}")
        self._signal(signal.SIGSTOP)
        times = answer["times"]
        assert [len(each) for each in times] == [new_tokens] * len(prompts), f"{self.name} gave other tokens"
        return times

    def end(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        return None


def all_sides(model: Model, args: argparse.Namespace) -> list[Side]:
    def python(name: str, interpreter: str | None, kind: str, reason: str = "", **more: str) -> Side:
        if interpreter is None or reason or shutil.which(interpreter) is None:
            return Side(name, None, reason or f"there is no interpreter at {interpreter}")
        return Side(name, [interpreter, "-P", str(HERE / "children.py"), kind, json.dumps(options | more)])

    max_tokens = args.prompt_tokens + args.new_tokens + 16  # of a stream, with some to spare
    options = {
        "model": str(model.folder), "dtype": args.dtype, "threads": args.threads, "streams": max(args.streams),
        "max_tokens": max_tokens, "eager": args.vllm_eager,
    }  # fmt: skip
    other = str(Path(args.other).resolve() / ".venv/bin/python") if args.other else None
    no_peer = "a shape is measured for ours only" if model.is_shape else ""
    node, folder = shutil.which("node"), args.llama_cpp
    file = model.gguf()
    if node and file and folder:
        sizes = (str(args.threads), str(max_tokens))
        llama_cpp = Side(
            "llama.cpp", [node, str(HERE / "llama_cpp.mjs"), str(Path(folder).resolve()), str(file), *sizes]
        )
    else:
        missing = ("no folder with node-llama-cpp is named: --llama-cpp", "there is no node", NO_GGUF)
        reasons = [reason for reason, there in zip(missing, (folder, node, file), strict=True) if not there]
        llama_cpp = Side("llama.cpp", None, no_peer or reasons[0])
    return [
        python("ours", sys.executable, "ours"),
        python("packed", sys.executable, "ours", "" if file else NO_GGUF, model=str(file)),
        python("other", other, "ours", "" if other else "no other checkout is named: --other"),
        python("transformers", sys.executable, "transformers", no_peer),
        python("vllm", args.vllm_python, "vllm", no_peer or ("" if args.vllm_python else NO_VLLM)),
        llama_cpp,
    ]


def speeds(times: list[list[float]]) -> dict[str, float]:
    """`times`: when each stream's tokens came, in seconds since all were asked for."""
    first_s = [stream[0] for stream in times]
    decoding_s = max(first_s)
    end_s = max(stream[-1] for stream in times)
    late = sum(at_s > decoding_s for stream in times for at_s in stream)
    return {
        "decode_tokens_per_s": late / (end_s - decoding_s) if late else 0.0,
        "total_tokens_per_s": sum(map(len, times)) / end_s,
        "first_token_ms": 1e3 * sum(first_s) / len(first_s),
    }
