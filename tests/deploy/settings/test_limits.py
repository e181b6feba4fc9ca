"""The table of limits: what it says, and that every way to start a server takes it."""

from pathlib import Path

import pytest

from intarsia.deploy.settings.limits import Limits, as_text, markdown, rows
from intarsia.deploy.start.serve import server_settings
from intarsia.errors import InvalidSetting

DOCS = Path(__file__).parents[3] / "docs" / "reliability.md"


def test_the_page_on_reliability_has_the_table_of_the_code():
    """After a change: replace the page's table by what `intarsia limits --markdown` prints."""
    assert "\n".join(["", *markdown(), ""]) in DOCS.read_text()


def test_people_see_a_table_of_80_columns_with_all_limits():
    lines = [*as_text()]
    assert max(map(len, lines)) <= 80 and not any("|" in line for line in lines)
    for row in rows():
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{row.flag} "))
        assert row.default_text in lines[at] and lines[at].endswith(row.answer)
        assert lines[at + 1].startswith("    ") and row.about.startswith(lines[at + 1].strip())


def test_each_limit_has_a_unit_a_sentence_and_an_answer():
    for row in rows():
        assert row.unit and row.about.endswith(".") and row.answer, row.name
        assert row.default == getattr(Limits(), row.name)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_that_is_not_above_zero_is_refused_by_its_name(value: float):
    with pytest.raises(InvalidSetting) as refused:
        server_settings(head_timeout_s=value)
    assert refused.value.field == "head_timeout_s"


def test_settings_of_a_server_take_each_limit_by_its_name():
    given = {row.name: row.default * 2 for row in rows()}
    assert server_settings(**given).limits == Limits(**given)  # type: ignore[arg-type]
