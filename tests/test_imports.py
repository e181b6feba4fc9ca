"""Imports point one way; the core needs neither torch nor Ray; other libraries keep their names."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kvcache": set(),
    "kernels": set(),
    "proto": set(),
    "workers": {"kernels", "proto", "kvcache"},
    "controller": {"kvcache", "proto", "workers"},
    "deploy": {"kvcache", "proto", "workers", "controller", "kernels"},
}
FROM_WORKERS = {"actor", "facts", "environment", "checkpoint", "fork_server"}
"""What the controller may use of the workers: the actor, plain values and what is free of torch."""


def relative_imports(file: Path) -> list[tuple[str, str]]:
    """(folder, module) of each import of ours in a file: `from ..kvcache.pool import x` is ("kvcache", "pool")."""
    depth = len(file.relative_to(ROOT).parts) - 1
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > depth and not is_version(node):
            parts = (node.module or "").split(".")
            found.append((parts[0], ".".join(parts[1:])))
    return found


def is_version(node: ast.ImportFrom) -> bool:
    """Which version this is, anything may know."""
    return node.module is None and [each.name for each in node.names] == ["__version__"]


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_lies_below_them(folder: str):
    for file in python_files(folder):
        for target, module in relative_imports(file):
            allowed = MAY_IMPORT[folder] | {"errors", folder}
            assert target in allowed, f"{file.relative_to(ROOT)} imports {target}.{module}"
            if folder == "controller" and target == "workers":
                assert module in FROM_WORKERS, f"{file.relative_to(ROOT)} imports workers.{module}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_never_import_each_other_by_bare_names(folder: str):
    for file in python_files(folder):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {*MAY_IMPORT, "intarsia"}, f"{file.relative_to(ROOT)}: {name}"


def run_python(code: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**__import__("os").environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "module", ["kvcache.manager", "kvcache.check", "controller.scheduler", "proto.channel", "workers.facts"]
)
def test_core_loads_neither_torch_nor_ray(module: str, tmp_path: Path):
    code = f"import sys, intarsia.{module}; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert run_python(code, tmp_path) == "[]"


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path):
    code = "import sys, intarsia; print([m for m in ('torch', 'ray', 'transformers', 'grpc') if m in sys.modules])"
    assert run_python(code, tmp_path) == "[]"


def test_workers_started_from_the_root_find_other_libraries_named_as_our_folders(tmp_path: Path):
    """Ray puts the driver's working directory on a worker's path; `kernels` and `proto` must not become ours."""
    for name in ("kernels", "proto"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("STAND_IN = True\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[0] or '.'); sys.path.insert(0, '.')\n"
        "from intarsia.workers.environment import prepare_process; prepare_process()\n"
        "import kernels, proto; print(kernels.STAND_IN, proto.STAND_IN)"
    )
    assert run_python(code, ROOT, PYTHONPATH=str(tmp_path)) == "True True"


def test_ray_worker_of_a_driver_in_the_root_finds_the_stand_ins(tmp_path: Path):
    """The same in a real Ray cluster, with the driver started in the repository root."""
    for name in ("kernels", "proto"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("STAND_IN = True\n")
    code = """
import ray
from intarsia.controller.own_ray import ensure_ray
ensure_ray(1)
@ray.remote
def look():
    from intarsia.workers.environment import prepare_process
    prepare_process()
    import kernels, proto
    return hasattr(kernels, "STAND_IN"), hasattr(proto, "STAND_IN")
print(ray.get(look.remote()))
ray.shutdown()
"""
    assert run_python(code, ROOT, PYTHONPATH=str(tmp_path), RAY_ADDRESS="").splitlines()[-1] == "(True, True)"


def test_every_folder_with_code_is_named_as_a_package():
    """One that is not would be missing from what `pip install` copies, and nowhere else."""
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    inside = {path.parent.relative_to(ROOT) for path in ROOT.glob("[a-z]*/**/__init__.py")}
    folders = {".".join(("intarsia", *path.parts)) for path in inside if path.parts[0] not in ("tests", "build")}
    assert named == folders | {"intarsia"}
