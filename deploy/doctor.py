"""`intarsia doctor`: what is here, and what is missing, for people and for bug reports."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .config import PREFIX, SECRETS

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


def examine() -> list[Finding]:
    """All of it. Nothing is started, and no check takes the others down with it."""
    found = []
    for topic, check in CHECKS.items():
        try:
            found += check()
        except Exception as error:  # noqa: BLE001  a broken installation may raise anything
            found.append(Finding(topic, f"can not be told: {type(error).__name__}: {error}", False))
    return found


def _python() -> list[Finding]:
    version = platform.python_version()
    is_fine = (3, 11) <= sys.version_info[:2] < (3, 13)
    return [Finding("python", f"{version} at {sys.executable}", is_fine, "" if is_fine else "use Python 3.11 or 3.12")]


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
    from ..kernels import native

    found = []
    for name in ("paged_decode", "tokenwise"):
        library = native.library(name)
        if isinstance(library, str):
            found.append(Finding(f"kernel {name}", library, False, "apt-get install g++; a CPU is much slower without"))
        else:
            found.append(Finding(f"kernel {name}", f"compiled, in {native.cache_folder()}"))
    return found


def _ray() -> list[Finding]:
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        return [Finding("ray cluster", "RAY_ADDRESS is not set: a local cluster is started with each engine")]
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return [Finding("ray cluster", f"{address} does not answer", False, "start it, or unset RAY_ADDRESS")]
    is_fine = done.returncode == 0
    return [
        Finding(
            "ray cluster",
            f"{address} {'answers' if is_fine else 'does not answer'}",
            is_fine,
            "" if is_fine else "start it (ray start --head), or unset RAY_ADDRESS",
        )
    ]


def _variables() -> list[Finding]:
    names = sorted(name for name in os.environ if name.startswith(PREFIX) or name in OTHER_VARIABLES)
    return [Finding(name, _redacted(name, os.environ[name])) for name in names]


def _redacted(name: str, value: str) -> str:
    return "..." if any(part in name.lower().split("_") for part in SECRETS) else value


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "machine": _machine,
    "gpu": _gpu,
    "kernels": _kernels,
    "ray cluster": _ray,
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
