"""The few lines of C++ that a pretended device needs: compiled once, kept beside the compiled kernels."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

import torch

from intarsia.kernels.toolchain.cpp import cache_folder

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILE_TIMEOUT_S = 240


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def build_guard() -> Path:
    """The compiled library. Raises `RuntimeError` if it cannot be compiled."""
    key = sha256(f"{SOURCE.read_text()} {torch.__version__} {compiler()}".encode()).hexdigest()[:20]
    target = cache_folder() / f"pretended-cuda-{key}.so"
    if not target.exists():
        _compile(target)
    return target


def load_guard() -> None:
    """From now on torch takes it that there is a CUDA device, this one also where torch is built for real ones."""
    ctypes.CDLL(str(build_guard()))


def _compile(target: Path) -> None:
    """Into a file of our own first: other processes of this machine may be at it too."""
    program = compiler()
    if program is None:
        raise RuntimeError("a pretended CUDA device needs a C++ compiler (g++)")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder, "guard.so")
        command = [program, "-std=c++20", "-shared", "-fPIC", "-O1", f"-I{root / 'include'}", str(SOURCE)]
        command += [f"-L{root / 'lib'}", "-lc10", "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} could not be compiled: {done.stderr[-2000:]}")
        built.replace(target)
