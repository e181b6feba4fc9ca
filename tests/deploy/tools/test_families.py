import io
from pathlib import Path

from rich.console import Console

from intarsia.deploy.tools.families import docs_page, family_rows, markdown, print_rows
from intarsia.tests.models import FAMILIES
from intarsia.workers.known_families import KNOWN_FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "families.md"


def test_families_called_known_are_those_that_go_through_the_gate():
    assert {make().model_type for make in FAMILIES.values()} == set(KNOWN_FAMILIES)


def test_the_table_in_the_docs_is_what_the_command_prints():
    """After a change: intarsia families --docs > docs/families.md"""
    assert DOCS.read_text() == "\n".join([*docs_page(), ""])


def test_every_known_family_has_a_row_and_a_strategy():
    rows = {row.name: row for row in family_rows()}
    assert set(KNOWN_FAMILIES.values()) <= set(rows)
    assert all(row.strategy and row.tensor_parallel.startswith("1") for row in rows.values())
    assert rows["Bamba"].layer_kinds == "29 state + 3 full"
    assert rows["Gemma 3n"].layer_kinds.endswith("8 sliding-512 (shared) + 2 full (shared)")
    assert rows["Llama 3.2 Vision"].prefix_cache == "at any token, images by content"


def test_markdown_has_a_line_for_each_row():
    rows = family_rows()
    lines = list(markdown(rows))
    assert len(lines) == len(rows) + 2 and all(line.count("|") == 9 for line in lines)


def test_people_see_a_table_of_80_columns_with_all_families():
    screen = io.StringIO()
    print_rows(family_rows(), Console(file=screen, width=80))
    printed = screen.getvalue()
    assert max(map(len, printed.splitlines())) <= 80 and "|" not in printed
    assert all(f"\n{row.name} " in printed for row in family_rows())


def test_every_example_is_a_model_that_exists():
    assert all("/" in row.example for row in family_rows())
