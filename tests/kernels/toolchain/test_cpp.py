"""Compiling where it runs, and going on without a compiler."""

import ctypes
import logging
import shutil
from pathlib import Path

import pytest
import torch

from intarsia.errors import UnsupportedModel
from intarsia.kernels.paged_attention import Needs, select_backend
from intarsia.kernels.toolchain import cpp

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")

SMALL = "toolchain/calls"
"""The library that is compiled soonest."""

KERNELS = Path(cpp.__file__).parents[1]

PLAIN = Needs(torch.float32, heads=8, kv_heads=2, key_dim=64, value_dim=64)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that has asked for nothing yet, with an empty cache folder."""
    monkeypatch.setenv("INTARSIA_CACHE_DIR", str(tmp_path))
    cpp.library.cache_clear()
    yield tmp_path
    cpp.library.cache_clear()


@pytest.mark.parametrize("source", sorted(KERNELS.glob("*/*.cpp")), ids=lambda source: source.stem)
def test_every_library_compiles(source: Path):
    """Elsewhere, tests of a library that does not compile are skipped."""
    found = cpp.library(f"{source.parent.name}/{source.stem}")
    assert isinstance(found, ctypes.CDLL), found


def test_a_library_is_compiled_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(cpp.library(SMALL), ctypes.CDLL)
    [kept] = fresh.iterdir()
    cpp.library.cache_clear()
    monkeypatch.setattr(cpp, "_compile", lambda *_: pytest.fail("it was compiled again"))
    assert isinstance(cpp.library(SMALL), ctypes.CDLL)
    assert [kept] == list(fresh.iterdir())


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/nowhere/g++", "could not be run"), ("/bin/false", "ended with 1")],
)
def test_without_a_working_compiler_torch_is_used_and_the_log_says_why(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, reason: str
):
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert [select_backend([PLAIN], CPU).name for _ in range(3)] == ["torch"] * 3
    [record] = caplog.records
    assert "no native kernels, torch's are used instead" in record.getMessage()
    assert reason in record.getMessage()
    with pytest.raises(UnsupportedModel, match=f"'native' could not be compiled: .*{reason}"):
        select_backend([PLAIN], CPU, "native")


def test_another_processor_or_source_gets_a_library_of_its_own(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    cpp.library(SMALL)
    cpp.library.cache_clear()
    monkeypatch.setattr(cpp, "_processor", lambda: "another one")
    cpp.library(SMALL)
    assert len(list(fresh.iterdir())) == 2


def test_loading_it_leaves_the_rounding_of_tiny_numbers_alone(fresh: Path):
    """Linked with -ffast-math, a library would flush denormal numbers to zero in the whole process."""
    cpp.library(SMALL)
    assert float(torch.tensor(1e-30, dtype=torch.float32) * torch.tensor(1e-12)) > 0


def test_where_no_home_can_be_written_the_folder_for_temporary_files_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("INTARSIA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for home in ("/proc/none", "~"):
        monkeypatch.setenv("HOME", home)
        folder = cpp.cache_folder()
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # others could put a library there
    assert folder != cpp.cache_folder()
