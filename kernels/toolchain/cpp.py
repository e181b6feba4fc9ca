"""C++ compiled where it runs: `library` turns a source file beside its Python into a loaded library.

g++ is called at the first use and takes seconds; the result is kept under the user's cache folder, under a name made of
the source, the compiler, its flags and the processor's features, so that a shared home serves unlike machines. Without
a compiler there is a reason instead of a library, and the caller goes on without.
"""

import ctypes
import functools
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

TOOLCHAIN = Path(__file__).resolve().parent
KERNELS = TOOLCHAIN.parent

# Without -ffast-math: it would let the compiler add up in one order here and in another there.
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-c",
)
NO_NARROW_ARITHMETIC = "-mno-avx512fp16"
"""Else compilers compute in float16 what is written in float32 and stored in float16, here and not there, so the last
bits of a row depend on how many tokens it has."""

LINK_FLAGS = ("-shared", "-fopenmp")

NARROWER = {"avx2": ("-mno-avx512f",), "default": ("-mno-avx512f", "-mno-avx2")}
"""What ATEN_CPU_CAPABILITY, with which torch leaves out wide vectors, leaves out here."""

COMPILE_TIMEOUT_S = 120

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How the sources count kinds of numbers (`numbers.h`)."""


class Unavailable(Exception):
    """Why there is no library."""


def sources() -> list[str]:
    """The names of all there are."""
    return sorted(str(file.relative_to(KERNELS).with_suffix("")) for file in KERNELS.glob("*/*.cpp"))


@functools.cache
def library(name: str) -> ctypes.CDLL | str:
    """The library of kernels/`name`.cpp; or, in words, why there is none. Logged once per process and reason."""
    try:
        return ctypes.CDLL(str(_built(name)))
    except (Unavailable, OSError) as error:
        _warn_once(str(error))
        return str(error)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("no native kernels, torch's are used instead: %s", reason)


def cache_folder() -> Path:
    """Where compiled files are kept: INTARSIA_CACHE_DIR, or a folder of ours in the user's cache; where there is none
    that can be written, one in the folder for temporary files, which no other user may open."""
    wanted = os.environ.get("INTARSIA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(wanted) if os.environ.get("INTARSIA_CACHE_DIR") else Path(wanted, "intarsia")
    try:
        if wanted.startswith("~"):
            raise FileNotFoundError("this user has no home")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return _temporary_folder() or folder


def _temporary_folder() -> Path | None:
    """None where another user has put something in its place: what is loaded from there runs."""
    folder = Path(tempfile.gettempdir(), f"intarsia-kernels-{os.getuid()}")
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        facts = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return folder if is_own else None


def identity(name: str) -> str:
    """What the library of kernels/`name`.cpp depends on: source, compiler, flags, processor. Raises `Unavailable`."""
    source = KERNELS / f"{name}.cpp"
    headers = sorted([*TOOLCHAIN.glob("*.h"), *source.parent.glob("*.h")])
    texts = [source.read_text(), *(header.read_text() for header in headers)]
    version = _version(_compiler())
    return sha256("\n".join([*texts, version, *_compile_flags(), *LINK_FLAGS, _processor()]).encode()).hexdigest()[:20]


@functools.cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _compile_flags() -> tuple[str, ...]:
    own = (NO_NARROW_ARITHMETIC,) if _takes(_compiler(), NO_NARROW_ARITHMETIC) else ()
    return COMPILE_FLAGS + own + NARROWER.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), ())


@functools.cache
def _takes(compiler: str, flag: str) -> bool:
    """Older compilers, and those for other processors, do not know all flags."""
    try:
        _run([compiler, flag, "-x", "c++", "-fsyntax-only", os.devnull])
    except Unavailable:
        return False
    return True


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable("there is no C++ compiler (g++); install one and start again")
    return compiler


def _built(name: str) -> Path:
    source = KERNELS / f"{name}.cpp"
    target = cache_folder() / f"{source.stem}-{identity(name)}.so"
    if not target.exists():
        _compile(_compiler(), source, target)
    return target


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Into a file of our own first: other workers of this machine may be at it too."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        _run([compiler, *_compile_flags(), f"-I{TOOLCHAIN}", str(source), "-o", str(compiled)])
        _run([compiler, *LINK_FLAGS, str(compiled), "-o", str(linked)])
        linked.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise Unavailable(f"{Path(command[0]).name} ended with {done.returncode}: {first}")
    return done.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"
