"""Results on disk: nothing is lost and nothing is there twice, wherever a run is cut off."""

import json
import random
from pathlib import Path

import pytest

from intarsia.deploy.batch.journal import Input, Journal, begin_anew
from intarsia.errors import InvalidSetting

ABOUT = {"model": "oak"}


def batch(tmp_path: Path, count: int) -> Input:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n\n' for n in range(count)))  # empty lines are none
    return Input(path)


def result(place: int) -> str:
    return json.dumps({"place": place, "text": "ä" * (place % 7)}, ensure_ascii=False)


def expected(count: int) -> str:
    return "".join(result(place) + "\n" for place in range(count))


def test_results_appear_in_the_order_of_the_lines_when_all_are_there(tmp_path: Path):
    source, out = batch(tmp_path, 5), tmp_path / "out.jsonl"
    journal = Journal(out, source, ABOUT)
    for place, text in reversed(list(source.lines(journal))):
        assert json.loads(text) == {"n": place}
        assert not out.exists()
        journal.add(place, result(place))
    journal.finish()
    journal.close()
    assert out.read_text() == expected(5)
    assert not journal.path.exists()


def test_whatever_is_cut_off_the_next_run_completes_it(tmp_path: Path):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    source = batch(tmp_path, 20)
    for run in range(60):
        out = tmp_path / f"out-{run}.jsonl"
        for _ in range(4):
            journal = Journal(out, source, ABOUT)
            todo = [place for place, _ in source.lines(journal)]
            assert len(todo) == 20 - journal.resumed
            for place in rng.sample(todo, rng.randrange(len(todo) + 1)):
                journal.add(place, result(place))
            journal.close()
            size = journal.path.stat().st_size
            with journal.path.open("r+b") as file:
                file.truncate(rng.randrange(max(0, size - 90), size + 1))  # as if killed while writing
        journal = Journal(out, source, ABOUT)
        for place, _ in list(source.lines(journal)):
            journal.add(place, result(place))
        journal.finish()
        journal.close()
        assert out.read_text() == expected(20)


def test_a_result_is_taken_once(tmp_path: Path):
    journal = Journal(tmp_path / "out.jsonl", batch(tmp_path, 2), ABOUT)
    journal.add(1, result(1))
    with pytest.raises(AssertionError):
        journal.add(1, result(1))


def test_a_second_run_at_the_same_time_is_refused(tmp_path: Path):
    source = batch(tmp_path, 2)
    first = Journal(tmp_path / "out.jsonl", source, ABOUT)
    with pytest.raises(InvalidSetting, match="another run is writing"):
        Journal(tmp_path / "out.jsonl", source, ABOUT)
    first.close()
    Journal(tmp_path / "out.jsonl", source, ABOUT).close()


def test_the_journal_of_another_batch_or_model_is_refused_and_left_alone(tmp_path: Path):
    source, out = batch(tmp_path, 2), tmp_path / "out.jsonl"
    journal = Journal(out, source, ABOUT)
    journal.add(0, result(0))
    journal.close()
    before = journal.path.read_bytes()
    with pytest.raises(InvalidSetting, match=r"its model is 'oak', this one's 'ash'.*--restart"):
        Journal(out, source, {"model": "ash"})
    with pytest.raises(InvalidSetting, match="input_sha256"):
        Journal(out, batch(tmp_path, 3), ABOUT)
    assert journal.path.read_bytes() == before
    begin_anew(out)
    assert Journal(out, source, {"model": "ash"}).count == 0


def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "out.jsonl.partial").write_text("dear diary\n")
    with pytest.raises(InvalidSetting, match="no journal"):
        Journal(tmp_path / "out.jsonl", batch(tmp_path, 2), ABOUT)
    assert (tmp_path / "out.jsonl.partial").read_text() == "dear diary\n"


def test_a_batch_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(InvalidSetting, match="cannot be read"):
        Input(tmp_path / "nothing.jsonl")
