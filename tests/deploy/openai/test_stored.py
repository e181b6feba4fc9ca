"""Responses on disk: what is kept, for whom, how long, and what becomes of it."""

import random
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from intarsia.deploy.openai.stored import Database, ResponseStore, Stored, StoreSettings
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import InvalidRequest, InvalidSetting
from intarsia.tests.conftest import Loop

Open = Callable[..., Database]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the same file, again and again."""
    open_now: list[Database] = []

    def again(**limits: Any) -> Database:
        close()
        open_now.append(Database(tmp_path / "kept" / "it.sqlite3", Limits(**limits)))
        return open_now[-1]

    def close() -> None:
        while open_now:
            open_now.pop().close()

    yield again
    close()


def response(name: str, previous: str | None = None, status: str = "completed", size: int = 1) -> Stored:
    said = {"id": f"msg_{name}_said", "type": "message", "content": f"{name} says"}
    body = {"id": name, "status": status, "output": [said], "error": None}
    return Stored(name, status, previous, body, [{"id": f"msg_{name}", "type": "message", "content": name * size}])


def names(database: Database, tenant: str, known: list[str]) -> list[str]:
    return [name for name in known if database.get(tenant, name) is not None]


def test_what_was_put_is_found_after_a_restart(opened: Open):
    put = response("a")
    opened().put("oak", put)
    assert opened().get("oak", "a") == put
    opened().put_events("oak", "a", ["{}", '{"ä": 1}'])
    assert opened().get("oak", "a") == put._replace(events=["{}", '{"ä": 1}'])


def test_a_tenant_finds_nothing_of_anothers(opened: Open):
    database = opened()
    database.put("oak", response("a"))
    database.put("ash", response("b", previous="a"))
    assert database.get("ash", "a") is None
    assert database.chain("ash", "b") is None
    assert not database.delete("ash", "a") and database.get("oak", "a") is not None
    assert database.totals("elm") == (0, 0) and database.totals(None)[0] == 2
    database.put("ash", response("a", status="failed"))  # of the same id
    found = database.get("oak", "a")
    assert found is not None and found.status == "completed"


def test_a_conversation_is_its_items_from_the_beginning(opened: Open):
    database = opened()
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        database.put("oak", response(name, previous))
    told = database.chain("oak", "c")
    assert told is not None
    assert [item["content"] for item in told] == ["a", "a says", "b", "b says", "c", "c says"]
    assert database.chain("oak", "nothing") is None
    database.delete("oak", "a")
    assert database.chain("oak", "c") is None


def test_items_are_found_by_their_ids_as_long_as_a_response_has_them(opened: Open):
    database = opened()
    database.put("oak", response("a"))
    database.put("oak", response("b"))
    wanted = ["msg_a_said", "msg_b", "msg_a_said", "nothing"]
    assert {name: item["content"] for name, item in database.items("oak", wanted).items()} == {
        "msg_a_said": "a says",
        "msg_b": "b",
    }
    assert database.items("ash", wanted) == {}
    database.put("oak", response("a", size=2))
    assert database.items("oak", ["msg_a"])["msg_a"]["content"] == "aa"
    database.delete("oak", "a")
    assert [*database.items("oak", wanted)] == ["msg_b"]


def test_a_response_that_is_still_being_made_is_no_beginning(opened: Open):
    database = opened()
    database.put("oak", response("a", status="in_progress"))
    with pytest.raises(InvalidRequest, match="'a' is still being made"):
        database.chain("oak", "a")


def test_items_are_read_of_no_more_than_a_request_may_bring(opened: Open):
    database = opened(max_body_bytes=500)
    for name in "abcd":
        database.put("oak", response(name, size=20))
    assert len(database.items("oak", ["msg_a", "msg_a_said"])) == 2
    with pytest.raises(InvalidRequest, match=r"input names have \d+ bytes") as refused:
        database.items("oak", ["msg_a", "msg_b", "msg_c", "msg_d"])
    assert refused.value.field == "input"


def test_a_conversation_in_a_circle_ends(opened: Open):
    database = opened()
    database.put("oak", response("a", previous="b"))
    database.put("oak", response("b", previous="a"))
    assert database.chain("oak", "a") is None


@pytest.mark.parametrize(("limit", "words"), [({"max_messages": 5}, "6 items"), ({"max_body_bytes": 300}, "bytes")])
def test_a_conversation_has_no_more_than_a_request_may_bring(opened: Open, limit: dict[str, int], words: str):
    database = opened(**limit)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        database.put("oak", response(name, previous))
    with pytest.raises(InvalidRequest, match=words) as refused:
        database.chain("oak", "c")
    assert refused.value.field == "previous_response_id" and next(iter(limit)) in refused.value.message


def test_the_oldest_make_room_by_count_and_by_bytes(opened: Open):
    rng = random.Random(seed := 3)
    print("seed", seed)
    database = opened(max_stored_responses=5, max_stored_bytes=3000)
    database.put("ash", response("apart"))
    known: list[str] = []
    for number in range(60):
        known.append(f"r{number}")
        database.put("oak", response(known[-1], size=rng.randint(1, 400)))
        kept = names(database, "oak", known)
        count, size = database.totals("oak")
        assert kept == known[-count:] and count <= 5
        assert size <= 3000 or count == 1
    assert database.get("ash", "apart") is not None


def test_a_response_that_alone_is_too_large_stays_until_the_next(opened: Open):
    database = opened(max_stored_bytes=100)
    database.put("oak", response("a", size=1000))
    assert database.get("oak", "a") is not None
    database.put("oak", response("b"))
    assert names(database, "oak", ["a", "b"]) == ["b"]


def test_what_is_too_old_is_not_found_and_forgotten(opened: Open):
    opened().put("oak", response("a"))
    time.sleep(0.02)
    database = opened(max_stored_age_s=0.01)
    assert database.get("oak", "a") is None and database.totals(None)[0] == 1
    database.forget_old()
    assert database.totals(None) == (0, 0)


def test_what_was_being_made_when_the_server_ended_has_failed(opened: Open):
    database = opened()
    for name, status in (("a", "queued"), ("b", "in_progress"), ("c", "completed")):
        database.put("oak", response(name, status=status))
    error = {"code": "server_error", "message": "it ended"}
    database.end_those_that_ran(error)
    for name, status, told in (("a", "failed", error), ("b", "failed", error), ("c", "completed", None)):
        found = database.get("oak", name)
        assert found is not None and (found.status, found.body["status"], found.body["error"]) == (status, status, told)


def test_only_its_owner_reads_it_and_what_is_deleted_is_gone(opened: Open, tmp_path: Path):
    database = opened()
    database.put("oak", response("xylophone", size=50))
    files = [*(tmp_path / "kept").iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files if "sqlite3" in path.name] == [0] * 3
    database.delete("oak", "xylophone")
    opened().close()
    assert not [path for path in (tmp_path / "kept").iterdir() if b"xylophone" in path.read_bytes()]


def test_a_file_is_one_servers_alone(opened: Open, tmp_path: Path):
    opened()
    with pytest.raises(InvalidSetting, match="another server keeps its responses") as refused:
        Database(tmp_path / "kept" / "it.sqlite3", Limits())
    assert refused.value.field == "response_folder"


@pytest.mark.parametrize("content", [b"no database at all" * 100, None])
def test_a_place_of_no_use_is_told(tmp_path: Path, content: bytes | None):
    path = tmp_path / "it.sqlite3"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(InvalidSetting, match="responses cannot be kept in") as refused:
        Database(path, Limits())
    assert "--response-folder" in refused.value.message


def test_each_port_has_its_file_and_any_port_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    usual = StoreSettings()
    assert usual.path(8000) == tmp_path / "intarsia" / "responses" / "port-8000.sqlite3"
    assert usual.path(0) is None
    assert StoreSettings(folder="/there").path(0) == Path("/there/port-0.sqlite3")


def test_a_store_for_any_port_is_forgotten_with_its_server(loop: Loop):
    store = ResponseStore(StoreSettings(), 0, Limits())
    assert store._temporary is not None
    folder = Path(store._temporary.name)

    async def use() -> None:
        await store.open()
        await store.ask(lambda database: database.put("oak", response("a")))
        assert (await store.ask(lambda database: database.totals(None)))[0] == 1
        await store.close()

    loop.run(use())
    assert not folder.exists()
