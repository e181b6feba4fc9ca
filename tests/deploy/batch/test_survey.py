"""What is counted of a batch before and after it."""

import json
from pathlib import Path

import pytest

from intarsia.deploy.batch.journal import Input
from intarsia.deploy.batch.run import BatchSettings, main
from intarsia.deploy.batch.survey import outcome, survey
from intarsia.deploy.settings.options import engine_settings
from intarsia.errors import InvalidSetting


def batch(path: Path, *asked: tuple[str, str | None]) -> Input:
    """A file with a line for each (custom_id, model), and a blank line after the first."""
    lines = [
        json.dumps(
            {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "model": model}}
        )
        for name, model in asked
    ]
    lines.insert(1, "")
    path.write_text("\n".join(lines) + "\n")
    return Input(path)


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path):
    assert list(batch(tmp_path / "in", ("a", None), ("b", None)).numbers) == [1, 3]


def test_a_custom_id_that_comes_again_is_told_with_both_lines(tmp_path: Path):
    [note] = survey(batch(tmp_path / "in", ("a", "m"), ("b", None), ("a", None)), "m").notes("m")
    assert "line 4 and line 1 are both 'a'" in note


def test_lines_that_ask_for_another_model_are_told_before_it_is_loaded(tmp_path: Path):
    [note] = survey(batch(tmp_path / "in", ("a", "m"), ("b", "gpt-4o-mini")), "m").notes("m")
    assert "1 of 2 lines ask for the model 'gpt-4o-mini', the first is line 3; this run serves 'm'" in note


def test_a_batch_of_which_no_line_asks_for_the_model_is_refused_before_anything_starts(tmp_path: Path):
    batch(tmp_path / "in", ("a", "gpt-4o-mini"), ("b", "gpt-4o-mini"))
    with pytest.raises(InvalidSetting, match="Give --served-model-name gpt-4o-mini") as refused:
        main(BatchSettings(tmp_path / "in", tmp_path / "out"), engine_settings("demo"))
    assert refused.value.field == "served_model_name"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("statuses", "strict", "exit_status", "said"),
    [
        ((200, 200), True, 0, "2 answered, 0 refused"),
        ((200, 404), False, 0, "1 answered, 1 refused (404 x1): first at line 3: no such model"),
        ((200, 404), True, 3, "1 answered, 1 refused (404 x1)"),
        ((404, 404), False, 3, "0 answered, 2 refused (404 x2): first at line 1: no such model"),
        ((200, None), False, 3, "1 answered, 1 refused (line x1): first at line 3: "),
        ((None, 400), False, 3, "0 answered, 2 refused (line x1, 400 x1): first at line 1: this is no JSON"),
    ],
)
def test_exit_status_and_last_line_tell_answers_from_refusals(
    statuses: tuple[int | None, ...], strict: bool, exit_status: int, said: str, tmp_path: Path
):
    source, out = batch(tmp_path / "in", ("a", None), ("b", None)), tmp_path / "out"

    def row(status: int | None) -> dict:
        if status is None:
            return {"id": "batch_req_1", "response": None, "error": {"message": "line 1: this is no JSON"}}
        body = {} if status == 200 else {"error": {"message": "no such model"}}
        return {"id": "batch_req_1", "response": {"status_code": status, "body": body}, "error": None}

    out.write_text("".join(json.dumps(row(status), separators=(",", ":")) + "\n" for status in statuses))
    assert str(outcome(out, source.numbers)).startswith(said)
    assert main(BatchSettings(tmp_path / "in", out, strict=strict), engine_settings("demo")) == exit_status
