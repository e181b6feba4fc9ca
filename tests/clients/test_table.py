"""The table of clients, the programs beside it and the page agree. The clients themselves: `make test-clients`."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from intarsia.tests.clients import __main__ as runner
from intarsia.tests.clients import environments, report
from intarsia.tests.clients.report import Answer, Result
from intarsia.tests.clients.table import CLIENTS, PROGRAMS, Client

LOOSE = {
    "py": r"import probing; probing.probe('a')(lambda: print('a', end='') or 'b\u2028c'); probing.run()",
    "mjs": r'import { probe } from "./probing.mjs"; await probe("a", () => process.stdout.write("a") && "b\u2028c");',
}
"""Clients that print in the line of their answer. In the answer is a line separator, which JSON may leave as it is."""

TARGET = {"BASE_URL": "http://127.0.0.1:1/v1", "MODEL": "m", "API_KEY": "k", "TOKENIZER": "", "GRPC": ""}

ANSWERS = (Answer("chat", True, "24 tokens"), Answer("a|b", False, "<html>\nno"))


def test_every_client_has_its_program_and_every_program_its_client():
    assert {client.program for client in CLIENTS} == set(PROGRAMS.glob("try_*"))
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_package_has_bounds_and_every_program_has_probes(client: Client):
    bounds = r">=[\d.]+,<\d+(\.\d+)?$" if client.source == "pip" else r"@\^[\d.]+$"
    assert all(re.search(bounds, package) for package in client.packages), client.packages
    assert len(re.findall(r"\bprobe\(", client.program.read_text())) >= 1


def test_the_page_names_every_client():
    rows = re.findall(r"^\| (\S+) \((pip|npm)\) \|", report.PAGE.read_text(), re.MULTILINE)
    assert rows == [(client.name, client.source) for client in CLIENTS]


def test_a_result_tells_what_failed_what_was_not_run_and_what_cannot_be_installed():
    first, second, third, *_ = CLIENTS
    told = report.text([(first, Result({"p": "1.0"}, ANSWERS)), (second, None), (third, Result({}, (), "no wheel"))])
    assert "| openai (pip) | p 1.0 | 1 of 2 |" in told
    assert f"| {second.name} (pip) |  | not run |" in told
    assert f"| {third.name} (pip) |  | cannot be installed here: no wheel |" in told
    assert r"| openai | a\|b | **fails** | &lt;html> no |" in told


def test_what_is_saved_is_loaded_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    result = Result({"p": "1.0"}, ANSWERS, "ended with 1")
    assert report.load(CLIENTS[0]) is None
    report.save(CLIENTS[0], result)
    assert report.load(CLIENTS[0]) == result and not result.is_fine


@pytest.mark.parametrize("ending", LOOSE)
def test_an_answer_is_kept_when_the_client_prints_in_its_line(ending: str, tmp_path: Path):
    interpreter = sys.executable if ending == "py" else shutil.which("node")
    if interpreter is None:
        pytest.skip("no node here")
    program = tmp_path / f"try_it.{ending}"
    program.write_text(LOOSE[ending])
    shutil.copy(PROGRAMS / "probing.mjs", tmp_path)
    ready = environments.Ready((interpreter, str(program)), tmp_path, {})
    assert runner._run(ready, TARGET) == ((Answer("a", True, "b\u2028c"),), 0, "")


def test_a_client_that_is_not_known_is_told_with_those_that_are():
    assert [client.name for client in runner.chosen("dspy,llm")] == ["dspy", "llm"]
    assert runner.chosen("") == list(CLIENTS)
    with pytest.raises(SystemExit, match="no client curl; there are openai, "):
        runner.chosen("dspy,curl")


def test_what_the_installer_says_becomes_the_reason(tmp_path):
    with pytest.raises(environments.NotInstalled, match="no such wheel"):
        environments._run(["bash", "-c", "echo 'no such  wheel' | tr -s ' ' >&2; exit 1"], tmp_path)
