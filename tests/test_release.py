"""What is published: a wheel and a source distribution, built here from what git has."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source distribution is not built anew")


def checks() -> Any:
    """`release/check.py`, which is no part of the package."""
    place = importlib.util.spec_from_file_location("release_check", ROOT / "release" / "check.py")
    assert place and place.loader
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


class Published(NamedTuple):
    wheel: Path
    archive: Path
    said: str  # by setuptools


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Built as `make wheel` does, but from a copy, and with the setuptools that is there if it is one that can."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in checks().of_git():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(source)], capture_output=True, text=True, timeout=280
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    [wheel], [archive] = out.glob("*.whl"), out.glob("*.tar.gz")
    return Published(wheel, archive, built.stdout + built.stderr)


def test_wheel_and_archive_hold_what_git_has_and_nothing_else(published: Published):
    check = checks()
    tracked = check.of_git()
    assert not check.faults_of_wheel(published.wheel, tracked)
    assert not check.faults_of_archive(published.archive, tracked)


def test_setuptools_does_not_warn_of_a_folder_that_could_be_imported(published: Published):
    assert "importable" not in published.said and "is absent from" not in published.said
    assert not re.findall(r"\w*DeprecationWarning", published.said)


def test_the_wheel_has_types_and_the_files_of_clusters(published: Published):
    names = set(zipfile.ZipFile(published.wheel).namelist())
    assert {"intarsia/py.typed", "intarsia/deploy/cluster/serve.yaml", "intarsia/deploy/cluster/grafana.json"} <= names
    assert not any("/tests/" in name or "/bench/" in name for name in names)


def test_the_archive_has_all_that_its_tests_need(published: Published):
    with tarfile.open(published.archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"Makefile", "constraints.txt", "CHANGELOG.md", "docs/http.md", "bench/engine.py"} <= names
    assert {"tests/conftest.py", "tests/models.py", "tests/deploy/test_cli.py", "tests/test_snippets.py"} <= names


def test_a_missing_file_and_a_stray_one_are_told(published: Published, tmp_path: Path):
    check = checks()
    tracked = check.of_git()
    assert "the wheel lacks intarsia/deploy/new.py" in check.faults_of_wheel(
        published.wheel, tracked | {"deploy/new.py"}
    )
    stray = check.faults_of_wheel(published.wheel, tracked - {"deploy/cli.py"})
    assert stray == ["the wheel has intarsia/deploy/cli.py, which is not meant to be there"]
    assert check.faults_of_archive(published.archive, tracked | {"tests/test_new.py"}) == [
        "the source distribution lacks tests/test_new.py"
    ]


def test_the_description_of_an_index_is_whole_in_itself(published: Published):
    with zipfile.ZipFile(published.wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith("METADATA")]
        text = file.read(name).decode()
    description = text.partition("\n\n")[2]
    assert description.startswith("# Intarsia") and "without an NVIDIA GPU" in description
    links = re.findall(r"\]\(([^)]+)\)|<img[^>]+src=\"([^\"]+)\"", description)
    assert all((one or other).startswith("https://") for one, other in links)


def test_every_python_that_is_allowed_has_a_classifier(published: Published):
    with zipfile.ZipFile(published.wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith("METADATA")]
        text = file.read(name).decode()
    assert "Requires-Python: <3.14,>=3.11" in text
    assert re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", text, re.M) == [
        "3.11",
        "3.12",
        "3.13",
    ]


def test_an_image_of_the_package_is_built_without_environments_and_history():
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "tests", "**/__pycache__"} <= set(left_out)
    assert not {"deploy", "docs/package.md", "README.md", "pyproject.toml", "LICENSE"} & set(left_out)
