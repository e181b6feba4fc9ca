"""`intarsia doctor`: what is here, and what is missing, for people and for bug reports."""

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ..settings.config_file import PREFIX, SECRETS
from ..start.ray_address import Standing, advice_for, can_be_asked, standing_at

PACKAGES = (
    "intarsia",
    "torch",
    "transformers",
    "ray",
    "grpcio",
    "protobuf",
    "fastapi",
    "uvicorn",
    "llguidance",
    "numpy",
)
OPTIONAL_PACKAGES = ("triton", "vllm", "vllm-flash-attn")

OTHER_VARIABLES = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "CXX", "HF_HUB_OFFLINE")


class Finding(NamedTuple):
    """One fact. `advice` says what to do where something is wrong."""

    topic: str
    fact: str
    is_fine: bool = True
    advice: str = ""


def run(as_json: bool) -> bool:
    """Print all findings. Whether all is fine."""
    findings = examine()
    if as_json:
        print(json.dumps(to_json(findings), indent=2))
    else:
        print_findings(findings)
    return all(finding.is_fine for finding in findings)


def examine() -> list[Finding]:
    """All of it. Nothing is started, and no check takes the others down with it."""
    found = []
    for topic, check in CHECKS.items():
        try:
            found += check()
        except Exception as error:  # noqa: BLE001  a broken installation may raise anything
            found.append(Finding(topic, f"cannot be told: {type(error).__name__}: {error}", False))
    return found


def _python() -> list[Finding]:
    version = platform.python_version()
    is_fine = (3, 11) <= sys.version_info[:2] < (3, 14)
    return [
        Finding("python", f"{version} at {sys.executable}", is_fine, "" if is_fine else "use Python 3.11, 3.12 or 3.13")
    ]


def _packages() -> list[Finding]:
    found = []
    for name in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            optional = name in OPTIONAL_PACKAGES
            advice = "" if optional else f"pip install {name}"
            found.append(Finding(name, "not installed (optional)" if optional else "not installed", optional, advice))
    return found


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as lines:
        sizes = {line.split(":")[0]: int(line.split()[1]) // 2**10 for line in lines}
    memory = f"{sizes['MemAvailable']:,} of {sizes['MemTotal']:,} MiB free"
    return [Finding("machine", f"{platform.machine()}, {cores} cores, {memory}")]


def _home() -> list[Finding]:
    from ...kernels.toolchain.cpp import cache_folder

    home, kept = os.path.expanduser("~"), str(cache_folder())
    if os.access(home, os.W_OK):
        return [Finding("home", home)]
    advice = f"compiled kernels are kept in {kept}; INTARSIA_CACHE_DIR names a folder that lasts longer"
    return [Finding("home", f"{home} cannot be written", True, advice)]


def _ports() -> list[Finding]:
    """Look at the ports that `serve` listens on by default. One in use is a remark: a server of ours may be running."""
    found = []
    for name, port in (("HTTP", 8000), ("gRPC", 50051)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            is_free = _can_listen(probe, port)
        flag = "--port" if name == "HTTP" else "--grpc-port"
        fact = f"{port} is free" if is_free else f"{port} is in use"
        found.append(Finding(f"port {name}", fact, True, "" if is_free else f"serve with another: {flag} 0 takes one"))
    return found


def _can_listen(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def _shared_memory() -> list[Finding]:
    """Ray's object store lies there. Docker gives 64 MiB unless told otherwise; Ray then takes the slower /tmp."""
    from ..start.before_ray import OBJECT_STORE_BYTES

    free_bytes = shutil.disk_usage("/dev/shm").free
    is_fine = free_bytes >= OBJECT_STORE_BYTES
    advice = "" if is_fine else f"in a container: docker run --shm-size={OBJECT_STORE_BYTES >> 20}m, or more"
    return [Finding("/dev/shm", f"{free_bytes >> 20:,} MiB free", is_fine, advice)]


def _browser() -> list[Finding]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return [Finding("chromium", found or "not found (optional: only tests of the console use it)")]


def _gpu() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        advice = "this torch is built without CUDA: install the build for your driver" if has_driver else ""
        return [Finding("gpu", "none that torch can use", not has_driver, advice)]
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Finding(f"gpu {index}", f"{about.name}, {free // 2**20:,} of {total // 2**20:,} MiB free"))
    return found


def _kernels() -> list[Finding]:
    from ...kernels.toolchain import cpp

    libraries = {name: cpp.library(name) for name in cpp.sources()}
    compiled = [name.rpartition("/")[2] for name, library in libraries.items() if not isinstance(library, str)]
    found = [Finding("kernels", f"{', '.join(compiled)}: compiled, in {cpp.cache_folder()}")] if compiled else []
    # Those that lack are told by reason.
    reasons: dict[str, list[str]] = {}
    for name, library in libraries.items():
        if isinstance(library, str):
            reasons.setdefault(library, []).append(name.rpartition("/")[2])
    has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    advice = "" if has_compiler else "optional: apt-get install g++; a CPU is much slower without"
    for reason, names in reasons.items():
        found.append(Finding("kernels", f"not compiled: {', '.join(names)}; {reason}", not has_compiler, advice))
    return found + _products()


def _products() -> list[Finding]:
    """Which way products go, as measured on this machine; kept beside the compiled kernels."""
    import torch

    from ...kernels.products import NativeLinear
    from ...kernels.products.cpu import vectors
    from ...kernels.products.ways import way_of

    if NativeLinear.lacks() is not None:
        return [Finding("products", "torch's; the last bits of an answer depend on what is computed beside it")]
    ways = [Finding(f"products {name}", way_of(getattr(torch, name)).told) for name in ("float32", "bfloat16")]
    return [Finding("vectors", vectors()), *ways]


def _ray() -> list[Finding]:
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return [Finding("ray cluster", "RAY_ADDRESS is not set: a local cluster is started with each engine")]
    if not can_be_asked(address):
        return [Finding("ray cluster", f"{address}: only Ray itself can find out about this form of address")]
    standing = standing_at(address)
    is_fine = standing is Standing.WELCOME
    advice = "" if is_fine else advice_for(standing)
    return [Finding("ray cluster", f"{address} {standing.value}", is_fine, advice)]


def _variables() -> list[Finding]:
    names = sorted(name for name in os.environ if name.startswith(PREFIX) or name in OTHER_VARIABLES)
    return [Finding(name, _redacted(name, os.environ[name])) for name in names]


def _redacted(name: str, value: str) -> str:
    return "..." if any(part in name.lower().split("_") for part in SECRETS) else value


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "machine": _machine,
    "home": _home,
    "ports": _ports,
    "/dev/shm": _shared_memory,
    "gpu": _gpu,
    "kernels": _kernels,
    "ray cluster": _ray,
    "chromium": _browser,
    "environment": _variables,
}


def print_findings(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row("ok" if finding.is_fine else "!!", finding.topic, finding.fact)
        if finding.advice:
            table.add_row("", "", f"-> {finding.advice}")
    Console(highlight=False).print(table)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    return {"is_fine": all(finding.is_fine for finding in findings), "findings": [f._asdict() for f in findings]}
