"""Settings from flags, variables and files, and what the doctor finds."""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from intarsia.deploy.cli import app
from intarsia.deploy.settings.places import kv_events
from intarsia.deploy.tools import doctor
from intarsia.errors import InvalidSetting


def serve(*arguments: str, **variables: str):
    return CliRunner().invoke(app, ["serve", *arguments, "--print-config"], env=variables)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("model: from-file\nkv-cache-memory: 1GiB\nmax_num_seqs: 7\nenable_prefix_caching: false\n")
    return path


def test_a_flag_comes_before_a_variable_before_the_file(file: Path):
    printed = serve(
        "--config", str(file), "--block-size", "4", INTARSIA_MAX_NUM_SEQS="8", INTARSIA_BLOCK_SIZE="2"
    ).stdout
    assert "block_size: 4  # flag" in printed
    assert "max_num_seqs: 8  # environment" in printed
    assert "kv_cache_memory: 1GiB  # file" in printed
    assert "enable_prefix_caching: false  # file" in printed
    assert "model: from-file  # file" in printed
    assert "dtype: auto\n" in printed


def test_what_is_printed_is_a_file_that_says_the_same(file: Path, tmp_path: Path):
    first = serve("--config", str(file), "--port", "0")
    again = tmp_path / "again.yaml"
    again.write_text(first.stdout)
    assert yaml.safe_load(serve("--config", str(again)).stdout) == yaml.safe_load(first.stdout)


def test_what_a_flag_takes_as_json_may_be_yaml_in_a_file(tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\nkv_events_config: {enable_kv_cache_events: true, topic: kv}\n")
    printed = yaml.safe_load(serve("--config", str(path)).stdout)
    assert json.loads(printed["kv_events_config"]) == {"enable_kv_cache_events": True, "topic": "kv"}


@pytest.mark.parametrize("given", ["{", "[]", "5", "[" * 9000])
def test_json_of_a_flag_that_is_none_is_refused(given: str):
    with pytest.raises(InvalidSetting, match="kv_events_config must be a JSON object"):
        kv_events(given, "kv_events_config")


def test_every_setting_is_a_variable():
    printed = yaml.safe_load(serve("m").stdout)
    values = {"kv_cache_memory": "3GiB", "grpc_port": "1", "served_model_name": "x", "torch_compile": "true"}
    variables = {f"INTARSIA_{name.upper()}": value for name, value in values.items()}
    changed = yaml.safe_load(serve("m", **variables).stdout)
    assert {name for name in printed if printed[name] != changed[name]} == set(values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_num_seq: 3", "sets max_num_seq, which is no setting. Did you mean max_num_seqs?"),
        ("- 3", "must map settings to values"),
        ("a: [", "is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | None, said: str):
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    result = serve("m", "--config", str(path))
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and said in result.stderr and "Traceback" not in result.stderr


def test_an_impossible_value_in_a_file_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text("max_num_seqs: many")
    result = serve("m", "--config", str(path))
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2 and "max_num_seqs" in said.lower().replace("-", "_") and "integer" in said, said


def test_the_fields_name_for_no_hybrid_cache_is_the_uniform_strategy():
    result = CliRunner().invoke(app, ["serve", "m", "--disable-hybrid-kv-cache-manager", "--strategy", "packed"])
    assert result.exit_code == 2 and "strategy packed is given" in result.stderr


def test_help_imports_nothing_heavy():
    heavy = ("torch", "ray", "transformers", "grpc")
    code = f"import sys; from intarsia.deploy import cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_doctor_tells_what_is_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INTARSIA_API_KEY", "hush")
    monkeypatch.setenv("INTARSIA_PORT", "1234")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    facts = {finding["topic"]: finding["fact"] for finding in found["findings"]}
    assert {"python", "torch", "ray", "machine", "kernels", "ray cluster"} <= set(facts)
    assert facts["INTARSIA_PORT"] == "1234" and facts["INTARSIA_API_KEY"] == "..."
    assert "hush" not in result.stdout
    assert result.exit_code == (0 if found["is_fine"] else 1)


def test_the_doctor_goes_on_when_a_check_breaks(monkeypatch: pytest.MonkeyPatch):
    def broken() -> list[doctor.Finding]:
        raise OSError("no such file")

    monkeypatch.setattr(doctor, "CHECKS", {"machine": broken, "python": doctor._python})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "cannot be told: OSError: no such file" in " ".join(result.stdout.split())
    assert "python" in result.stdout


def test_the_doctor_tells_of_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.CHECKS["home"]() == [doctor.Finding("home", str(tmp_path))]
    monkeypatch.setenv("HOME", "/proc/none")
    [found] = doctor.CHECKS["home"]()
    assert (found.topic, found.fact) == ("home", "/proc/none cannot be written")
    assert "INTARSIA_CACHE_DIR" in found.advice


def findings_of(*topics: str) -> dict[str, doctor.Finding]:
    return {finding.topic: finding for topic in topics for finding in doctor.CHECKS[topic]()}


def test_the_doctor_names_a_port_in_use_without_calling_it_a_fault():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another process has it: as good
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        port = findings_of("ports")["port HTTP"]
    assert port.is_fine and port.fact == "8000 is in use" and "--port" in port.advice


def test_the_doctor_tells_how_much_shared_memory_ray_has_and_where_the_tests_browser_is():
    found = findings_of("/dev/shm", "chromium")
    assert found["/dev/shm"].fact.endswith("MiB free")
    assert found["chromium"].is_fine


def test_a_missing_optional_compiler_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("intarsia.kernels.toolchain.cpp.library", lambda name: "no-such-compiler was not found")
    kernel = findings_of("kernels")["kernels"]
    assert kernel.is_fine and "optional" in kernel.advice
