import io

import pytest
from rich.console import Console

from intarsia.deploy.demo import DEMO_MODEL_DIR, demo_notes
from intarsia.deploy.terminal.banner import banner, human_bytes
from intarsia.tests.deploy.scripted import INFO


def printed(info, *addresses: str) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(banner(info, *addresses))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_banner_tells_the_facts_within_80_columns():
    text = printed(INFO, "http://127.0.0.1:8000", "127.0.0.1:50051")
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for fact in ("tiny-hybrid", "float32", "3 MiB", "64 MiB", "1,000", "12,500 tokens", "12.5", "layered", "16 KiB"):
        assert fact in text, fact
    assert "sliding-64" in text and "prefix caching on" in text and "127.0.0.1:50051" in text


def test_banner_tells_how_a_checkpoint_wants_to_be_sampled():
    wanted = (("temperature", 0.6), ("top_k", 64), ("top_p", 0.95), ("repetition_penalty", 1.05))
    text = printed(INFO._replace(sampling_defaults=wanted))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "temperature 0.6, top_k 64, top_p 0.95" in text and "generation_config.json" in text


def test_banner_of_the_demo_model_says_that_its_text_is_a_toys():
    text = printed(INFO._replace(notes=tuple(demo_notes(str(DEMO_MODEL_DIR)))))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    [line] = [line for line in text.splitlines() if line.startswith("note")]
    assert line.split(maxsplit=1)[1].rstrip() == "the demo model is a toy of 2 MB: its words are words, and that is all"
    assert not list(demo_notes("/models/gemma-3-27b-it"))


def test_banner_of_many_layers_still_fits_80_columns():
    scattered = tuple(range(0, 400, 2))
    text = printed(INFO._replace(groups=(INFO.groups[0]._replace(layers=scattered),), model="m" * 120))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "16 KiB" in text and "full" in text


def test_banner_without_prefix_caching_or_address_says_so():
    text = printed(INFO._replace(enable_prefix_caching=False))
    assert "prefix caching off" in text and "address" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 * 2**20, "64 MiB"), (2**50, "1024 TiB")],
)
def test_bytes_read_well(count: int, text: str):
    assert human_bytes(count) == text
