"""The page of all families that transformers has."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

import intarsia
from intarsia.deploy.proof.sweep import families, page, status_of
from intarsia.deploy.proof.verdict import Verdict
from intarsia.workers.known_families import KNOWN_FAMILIES

PAGE = Path(intarsia.__file__).parent / "docs" / "proven_families.md"
RIGHT, WRONG = Verdict("other", True, (1, 2), 1.0), Verdict("other", False, (1,), 1.0, "because | it\ndiffers")


def test_every_family_of_transformers_is_in_the_page_and_tested_ones_are_right():
    text = PAGE.read_text()
    if f"of transformers {version('transformers')}\n" not in text:
        pytest.skip("the page was made with another transformers")
    rows = dict(re.findall(r"^\| (\S+) \| ([^|]+) \|", text, re.MULTILINE))
    assert rows.keys() - {"`model_type`"} == set(families())
    assert not [name for name, status in rows.items() if name in KNOWN_FAMILIES and not status.startswith("tested")]


def test_what_is_found_is_told_in_a_row_each():
    *_, right, wrong = page([("beam", RIGHT), ("rwkv", WRONG)])
    assert right == "| beam | proven on load |  |"
    assert wrong == "| rwkv | refused | because / it differs |"


def test_a_family_that_is_run_with_its_encoder_is_tested_though_no_proof_tries_it():
    assert status_of("mllama", WRONG) == "tested"
    assert status_of("llama", RIGHT._replace(family="llama")) == "tested"
    assert status_of("doge", RIGHT._replace(ranks=(1,), reason="why")) == "proven on load, on one rank"
