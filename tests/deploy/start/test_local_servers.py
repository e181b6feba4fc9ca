"""How `intarsia top` finds the servers of its user."""

import os
from pathlib import Path

import pytest

from intarsia.deploy.start.local_servers import Running, announced, folder, running
from intarsia.deploy.tools.top import Server, find_server
from intarsia.errors import InvalidSetting


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_server_is_found_while_it_runs():
    with announced("http://127.0.0.1:1", "walnut"):
        assert running() == [Running(os.getpid(), "http://127.0.0.1:1", "walnut")]
        assert find_server(None, None, None) == Server("http://127.0.0.1:1", "walnut")
        assert find_server("http://127.0.0.1:1/", None, None).admin_key == "walnut"
        assert find_server(None, "oak", None).admin_key == "oak"
    assert running() == []
    with pytest.raises(InvalidSetting, match="--url"):
        find_server(None, None, None)


def test_only_its_user_can_read_the_key():
    with announced("http://127.0.0.1:1", "walnut"):
        assert [path.stat().st_mode & 0o777 for path in folder().glob("*")] == [0o600]
        assert folder().stat().st_mode & 0o777 == 0o700


def test_what_a_dead_server_left_is_cleared_away():
    (folder() / "4194399.json").write_text('{"url": "http://127.0.0.1:1", "admin_key": null}')
    (folder() / "nonsense.json").write_text("{")
    assert running() == []
    assert not (folder() / "4194399.json").exists()


def test_a_folder_that_others_can_open_is_not_used(tmp_path: Path):
    (tmp_path / "intarsia").mkdir(mode=0o755)
    with pytest.raises(InvalidSetting, match="only its owner"):
        running()
    with announced("http://127.0.0.1:1", "walnut"):  # the server itself goes on without
        assert list((tmp_path / "intarsia").iterdir()) == []


@pytest.mark.parametrize("url", ["https://127.0.0.1:8000", "https://localhost:8000/", "https://127.0.0.1"])
def test_a_server_of_any_host_is_found_at_loopback_with_its_key(url: str):
    with announced("https://0.0.0.0:8000", "walnut"):
        found = find_server(url, None, None)
        assert (found.admin_key, found.url.rpartition(":")[2]) == ("walnut", "8000")


@pytest.mark.parametrize(
    "url", ["https://10.0.0.1:8000", "http://127.0.0.1:8000", "https://127.0.0.1:8001", "https://a.b"]
)
def test_a_key_goes_to_no_other_server(url: str):
    with announced("https://0.0.0.0:8000", "walnut"):
        assert find_server(url, None, None) == Server(url)
