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
    "proto": {"kvcache"},
    "workers": {"kernels", "proto", "kvcache"},
    "controller": {"kvcache", "proto", "workers"},
    "deploy": {"kvcache", "proto", "workers", "controller", "kernels"},
}
FOR_ALL = {"errors", "environment"}
FROM_WORKERS = "process"
"""All that the controller may import of the workers: the actors that Ray starts."""


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
            allowed = MAY_IMPORT[folder] | FOR_ALL | {folder}
            assert target in allowed, f"{file.relative_to(ROOT)} imports {target}.{module}"
            if folder == "controller" and target == "workers":
                assert module.split(".")[0] == FROM_WORKERS, f"{file.relative_to(ROOT)} imports workers.{module}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_never_import_each_other_by_bare_names(folder: str):
    for file in python_files(folder):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {*MAY_IMPORT, "intarsia"}, f"{file.relative_to(ROOT)}: {name}"


Arrows = dict[str, set[str]]
"""Of one folder: which of the files and folders in it uses which others."""


def arrows_by_folder() -> dict[str, Arrows]:
    """Every import of ours, drawn between the two places in the deepest folder that holds both its ends.

    An import of a name that is written out late, in a function or for type checkers alone, counts like any other.
    """
    files = {module_of(file): file for folder in MAY_IMPORT for file in python_files(folder)}
    found: dict[str, Arrows] = {}
    for module, file in files.items():
        package = file.relative_to(ROOT).parts[:-1]
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            for name in node.names:
                target = ".".join(filter(None, [*base, name.name]))
                target = target if target in files else ".".join(filter(None, base))
                if target in files and target != module:
                    draw(found, module.split("."), target.split("."))
    return found


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def draw(found: dict[str, Arrows], source: list[str], target: list[str]) -> None:
    depth = 0
    while depth < min(len(source), len(target)) and source[depth] == target[depth]:
        depth += 1
    if depth == min(len(source), len(target)):
        return  # a folder and what lies in it
    found.setdefault("/".join(source[:depth]), {}).setdefault(source[depth], set()).add(target[depth])


def circle_in(arrows: Arrows) -> list[str]:
    """A way along the arrows that comes back to where it began; empty if there is none."""
    done: set[str] = set()

    def follow(place: str, way: list[str]) -> list[str]:
        if place in way:
            return [*way[way.index(place) :], place]
        if place in done:
            return []
        for target in arrows.get(place, ()):
            if circle := follow(target, [*way, place]):
                return circle
        done.add(place)
        return []

    return next(filter(None, (follow(place, []) for place in arrows)), [])


def test_no_files_and_no_folders_import_each_other_in_a_circle():
    for folder, arrows in arrows_by_folder().items():
        circle = circle_in(arrows)
        assert not circle, f"in {folder or 'the root'}: {' -> '.join(circle)}"


def test_a_circle_of_imports_is_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}}) == []


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
    "module", ["kvcache.manager", "kvcache.check", "controller.scheduling.scheduler", "proto.channel", "proto.worker"]
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
        "from intarsia.environment import prepare_process; prepare_process()\n"
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
from intarsia.deploy.start.own_ray import ensure_ray
ensure_ray(1)
@ray.remote
def look():
    from intarsia.environment import prepare_process
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


def test_tests_that_start_servers_stay_in_one_process(request: pytest.FixtureRequest):
    """Two Ray clusters would get into each other's way. pytest-xdist tells groups by the ends of tests' names, which
    `conftest.py` says for this file."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("there is one process")
    assert request.node.nodeid.endswith("@servers")
